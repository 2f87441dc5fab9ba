"""A little text of the kind that agents write, to train tokenizers on."""

from __future__ import annotations

import json

WORDS = "the file holds a key value read write bash command list name answer done find it".split()


def texts() -> list[str]:
    return [
        f"<|im_start|>user\n{first} the {second} {index}<|im_end|>\n<|im_start|>assistant\n"
        f"<tool_call>\n{json.dumps({'name': first, 'arguments': {second: third}})}\n</tool_call>"
        for first in WORDS
        for index, second in enumerate(WORDS)
        for third in ("data/a-1.txt", "x = 20; y")
    ]
