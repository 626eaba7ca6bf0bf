"""Turn README and docs/*.md into plain HTML pages.

python scripts/build_docs.py build/docs
"""

from __future__ import annotations

import html
import shutil
import sys
from pathlib import Path

import markdown

ROOT = Path(__file__).parents[1]
PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{max-width:46rem;margin:3rem auto;padding:0 1rem;font:17px/1.6 system-ui;color-scheme:light dark}}
pre{{overflow:auto;padding:1rem;background:#8881}}table{{border-collapse:collapse}}td,th{{padding:.3rem .7rem;
border:1px solid #8884;text-align:left}}img{{max-width:100%}}</style>
{body}
"""


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")
    target.mkdir(parents=True, exist_ok=True)
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        body = markdown.markdown(path.read_text(encoding="utf-8"), extensions=["tables", "fenced_code"])
        body = body.replace('src="docs/images', 'src="images')
        name = "index.html" if path.name == "README.md" else f"{path.stem.lower()}.html"
        (target / name).write_text(PAGE.format(title=html.escape(path.stem), body=body), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", target / "images", dirs_exist_ok=True)
    print(target / "index.html")


if __name__ == "__main__":
    main()
