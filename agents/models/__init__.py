"""Language models as policies: loading, making and fetching them.

policy.py            a causal LM, its renderer and its version
tiny.py              small models and tokenizers made here
smollm2.py           a real instruct model from the package index
directories.py       writing a directory whole or not at all
chatml_tools.jinja   the chat template of both
"""
