"""Whether mlx-lm is there to compare with. Imports neither it nor MLX."""

from importlib.metadata import PackageNotFoundError, version

from ..errors import BackendMissingError


def require_peer() -> str:
    """The version of mlx-lm that is installed.

    Raises:
        BackendMissingError: none is.
    """
    try:
        return version("mlx-lm")
    except PackageNotFoundError:
        raise BackendMissingError(
            'There is no mlx-lm to compare with; pip install "mlxinfer[bench]", or use --skip-peer.'
        ) from None
