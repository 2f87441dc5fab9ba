import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGES = ("clawgym_env", "agents", "benchmarks")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_script_by_hand_gets_reward_one(tmp_path: Path) -> None:
    script = blocks(README, "python")[0]
    lines = [line for line in script.splitlines() if line.strip()]
    assert len(lines) <= 16
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for comment in re.findall(r"print\(.*\)  # (.*)", script):
        assert comment.removesuffix(" and ...") in done.stdout
    assert done.stdout.endswith("1.0 completed\n")


def test_every_python_example_is_valid_and_imports_what_exists() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    examples = [code for page in pages for code in blocks(page.read_text(), "python")]
    assert len(examples) >= 3
    for code in examples:
        tree = ast.parse(code)
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        subprocess.run([sys.executable, "-c", "\n".join(map(ast.unparse, imports))], check=True)


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_tree_shows_every_file() -> None:
    shown = set()
    folder = ""
    for line in blocks(README, "text")[-1].splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            shown.add(folder + name)
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".jinja") and path.name != "__init__.py"
    }
    assert shown == files
