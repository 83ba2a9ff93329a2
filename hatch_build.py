"""What hatchling adds to the metadata of the package: the links of the project, and README.md as its description.

An index of packages shows the description away from the repository. So each relative link and picture gets the address
that the file has in the repository, at the tag of this version. The address itself stands in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

TARGET = re.compile(r"(?P<picture>!?)(?P<label>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
SOURCE = re.compile(r"(?P<before><(?:img|source)\b[^>]*?\s(?:src|srcset)=\")(?P<target>[^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z]+:|#")  # an address, or a heading of the page itself


def away_from_home(page: str, repository: str, version: str) -> str:
    """Return a page in Markdown whose links and pictures work wherever the page is shown.

    Args:
        page: the text, whose relative links begin in the root of the repository.
        repository: address of the repository.
        version: version of the package, for which the repository has the tag "v" + version.
    """

    def address(target: str, kind: str) -> str:
        return (
            target
            if ELSEWHERE.match(target)
            else f"{repository}/{kind}/v{version}/{target.removeprefix('./')}"
        )

    def link(found: re.Match[str]) -> str:
        label = TARGET.sub(link, found["label"])  # a picture may be a link
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}{label}({address(found['target'], kind)})"

    page = TARGET.sub(link, page)
    return SOURCE.sub(lambda found: f'{found["before"]}{address(found["target"], "raw")}"', page)


class Metadata(MetadataHookInterface):
    """Sets the fields that pyproject.toml calls dynamic. hatchling looks for a subclass of its interface here."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        page = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = away_from_home(page, repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Documentation": f"{repository}/tree/v{metadata['version']}/docs",
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{metadata['version']}/CHANGELOG.md",
        }
