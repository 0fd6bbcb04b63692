"""A checkpoint or an exported model to a repository of the Hugging Face hub, with the token of this user.

What goes wrong is an error of the client's HTTP library, of which it has had three, of its upload threads or of the
disk: each is refused with its first line.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from noloco_p2p.errors import PushError


def claim(repo: str) -> None:
    """Make the repository, private, or find it: asked before hours of work. Raises PushError."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(
            f"--push-to-hub {repo}: {_first_line(error)}. `hf auth login`, or HF_TOKEN, gives a token that may write"
        ) from None


def push(folder: Path, repo: str) -> str:
    """Upload what is in `folder` and not there yet; files of the same name are replaced. The address of the repository.

    Raises PushError; the folder stays as it is.
    """
    try:
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, by noloco_p2p")
        return f"{HfApi().endpoint}/{repo}"
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(f"{folder} is whole, but was not pushed to {repo}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
