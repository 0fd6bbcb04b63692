"""Uploading a checkpoint or an exported model to the Hugging Face hub, with the token of this user.

A failure is an error of the client's HTTP library (it has had three), of its upload threads, or of the disk; each
becomes a PushError with its first line.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from noloco_p2p.errors import PushError


def claim(repo: str) -> None:
    """Create the private repository, or find it, before long work. Raises PushError."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(
            f"--push-to-hub {repo}: {_first_line(error)}. "
            "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
        ) from None


def push(folder: Path, repo: str) -> str:
    """Upload the new files in `folder`; files of the same name are replaced. Returns the address of the repository.

    Raises PushError; the folder is not changed.
    """
    try:
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, by noloco_p2p")
        return f"{HfApi().endpoint}/{repo}"
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(f"{folder} is complete, but was not pushed to {repo}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
