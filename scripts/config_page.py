"""Make docs/deepspeed-config.md, the page of every key of a DeepSpeed configuration, from the table that reads them.

python scripts/config_page.py > docs/deepspeed-config.md
"""

import sys

from zeroshard.integrations.deepspeed.config_keys import KEYS


def markdown() -> str:
    """Return the document docs/deepspeed-config.md."""
    lines = [
        "# DeepSpeed's configuration: every key", "",
        "Honoured: the key does what it says. Noted: the key is accepted, and one line on stderr says why it changes nothing.",
        "Refused: the key is an error, which names it and what to do; where its value means *off* it is accepted. A section that",
        "is refused is refused with all its keys, which have no rows here. A key that is not in this table is an error if it",
        "resembles one that is, or if its section is typed (`fp16`, `bf16`, `zero_optimization`, the monitors); else it is noted.", "",
        "`zeroshard check ds_config.json` judges the keys of a file: it calls honoured ones *served* or *translated* (to the",
        "option that it shows), and noted ones *ignored*. `scripts/config_page.py` makes this page.", "",
        "| key | default | what it is | what that means |", "|---|---|---|---|",
    ]  # fmt: skip
    for key in KEYS.values():
        shown = "largest" if key.default == sys.maxsize else "" if key.default is None else repr(key.default).replace("|", "/")
        lines.append(f"| `{key.name}` | {shown} | {key.treatment.value} | {key.text.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
