"""Every test here sees an empty cache, and a stand-in for the hub where it asks for one."""

from standin_fixtures import cache, standin

__all__ = ["cache", "standin"]
