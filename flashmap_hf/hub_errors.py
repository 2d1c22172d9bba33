"""What the Hub answers, or that it does not, as one sentence with the way out."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HTTPError


def check_online(what: str) -> None:
    """Raise OSError where the user has switched the network off; `what`: the purpose, as in "to upload"."""
    if is_offline_mode():
        raise OSError(f"HF_HUB_OFFLINE=1 forbids to reach the Hub: unset it {what}")


@contextmanager
def reported(repo_id: str) -> Iterator[None]:
    """Around calls of the client that read or write `repo_id`.

    Raises:
        OSError: always in place of the client's errors.
    """
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = " ".join((error.server_message or str(error)).split())
        if status == 401:
            reason = "does not know the token (401): run `hf auth login` again, or set HF_TOKEN to a valid one"
        elif status == 403:
            reason = (
                f"does not let this token write to {repo_id} (403): use a token with write access, name another "
                "repository, or open a pull request (--create-pr)"
            )
        elif status == 404:
            reason = f"has no {repo_id} that this token may see (404): check its name and the token's rights"
        elif status >= 500 or status == 429:
            reason = f"cannot answer now ({status}): run it again later; what is uploaded is not sent twice"
        else:
            reason = f"refused ({status}): {said}"
        raise OSError(f"the Hub {reason}") from error
    except (HTTPError, ConnectionError) as error:  # HTTPError: of the client's transport, no answer came
        raise OSError(
            f"the Hub cannot be reached ({' '.join(str(error).split())}): check the connection and run it again"
        ) from error
