"""Components by name: lazy imports, taken and unknown names.

Files: ``generation/vllm/plugin.py``.
"""

from __future__ import annotations

import pytest

from groupwise.errors import ConfigError
from groupwise.registry import Registry


def test_a_string_is_imported_when_it_is_first_used():
    registry: Registry[object] = Registry("codec", {"json": "json:loads", "broken": "no_such_module:x"})
    import json

    assert registry["json"] is json.loads
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry["broken"]


def test_registering_adds_a_new_name_and_refuses_a_taken_one():
    registry: Registry[int] = Registry("number", {"one": 1})
    registry.register("two", 2)
    assert dict(registry) == {"one": 1, "two": 2} and "three" not in registry
    message = r"number 'one' is already registered; registered: one, two; choose another name"
    with pytest.raises(ConfigError, match=message):
        registry.register("one", 11)
    assert registry["one"] == 1


def test_an_unknown_name_lists_the_registered_ones_and_the_nearest():
    registry: Registry[int] = Registry("number", {"one": 1, "three": 3})
    message = r"unknown number 'thre'; registered: one, three; nearest valid: 'three'"
    with pytest.raises(ConfigError, match=message):
        registry["thre"]
