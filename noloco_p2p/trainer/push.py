"""Upload a checkpoint or an exported model to the Hugging Face hub with the user's token.

An upload can fail in the client's HTTP library, in its upload threads, or on the disk. Every such error becomes a
PushError with the first line of its message.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from noloco_p2p.errors import PushError


def claim(repo: str) -> None:
    """Create the private repository if it does not exist. Call this before long work. Raises PushError."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(
            f"--push-to-hub {repo}: {_first_line(error)}. "
            "Log in with `hf auth login`, or set HF_TOKEN; the token needs write access"
        ) from None


def push(folder: Path, repo: str) -> str:
    """Upload the new files in `folder`, and return the address of the repository.

    Files with the same name are replaced. `folder` is never changed. Raises PushError if the upload fails.
    """
    try:
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, exported by noloco_p2p")
        return f"{HfApi().endpoint}/{repo}"
    except Exception as error:  # noqa: BLE001 - see above
        raise PushError(f"{folder} is complete but could not be pushed to {repo}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
