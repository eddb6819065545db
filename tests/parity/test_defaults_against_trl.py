"""Fields and defaults of both configurations, and configurations that TRL wrote."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

from groupwise import GRPOConfig
from groupwise.config.trl import TRL_DEFAULTS, TRL_VERSION
from groupwise.errors import warn_once

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"

#: Fields that are resolved when our configuration is built, TRL's when the trainer is.
RESOLVED: dict[str, object] = {"epsilon_high": 0.2, "num_generations_eval": 8, "use_transformers_paged": None}


def defaults(config_class: type) -> dict[str, object]:
    return {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(config_class)
    }


def their_config(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.GRPOConfig(output_dir=str(directory), report_to="none", bf16=False, use_cpu=True)


def assert_holds(config: GRPOConfig, dumped: dict[str, Any]) -> None:
    """Every field of ``dumped`` has its value in ``config``."""
    ours = config.to_dict()
    assert {name: ours[name] for name in dumped} == {**dumped, **RESOLVED}


def test_the_version_is_the_one_that_is_compared():
    assert trl.__version__ == TRL_VERSION


def test_every_field_of_trl_exists():
    assert set(defaults(trl.GRPOConfig)) <= set(defaults(GRPOConfig))


def test_table_of_defaults_that_differ():
    ours, theirs = defaults(GRPOConfig), defaults(trl.GRPOConfig)
    different = {name: value for name, value in theirs.items() if repr(ours[name]) != repr(value)}
    assert different == TRL_DEFAULTS


def test_migration_guide_has_a_row_for_each_of_them():
    rows = MIGRATING.read_text().splitlines()
    ours = defaults(GRPOConfig)
    table = [f"| `{name}` | `{ours[name]!r}` | `{value!r}` |" for name, value in TRL_DEFAULTS.items()]
    start = rows.index(table[0])
    assert rows[start : start + len(table)] == table
    assert not rows[start + len(table)].startswith("|")


def test_trl_defaults(tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False, "use_cpu": True}
    config = GRPOConfig.trl_defaults(**settings)
    assert type(config) is GRPOConfig
    assert_holds(config, {**their_config(tmp_path).to_dict()})
    assert GRPOConfig.trl_defaults(**settings, max_completion_length=64).max_completion_length == 64


def test_trl_defaults_of_a_subclass(tmp_path):
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        extra: int = 1

    mine = Mine.trl_defaults(output_dir=str(tmp_path), bf16=False, extra=2)
    assert type(mine) is Mine
    assert (mine.extra, mine.max_completion_length) == (2, 512)


@pytest.mark.parametrize("how", ["arguments", "dict", "json", "yaml"])
def test_a_configuration_that_trl_wrote_loads_without_a_warning(how, tmp_path, caplog):
    warn_once.cache_clear()
    theirs = their_config(tmp_path)
    dumped, file = theirs.to_dict(), tmp_path / f"config.{how}"
    parser = HfArgumentParser(GRPOConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        if how == "arguments":
            config = GRPOConfig(**dumped)
        elif how == "dict":
            (config,) = parser.parse_dict(dumped)
        elif how == "json":
            file.write_text(theirs.to_json_string())
            (config,) = parser.parse_json_file(file)
        else:
            file.write_text(yaml.safe_dump(dumped))
            (config,) = parser.parse_yaml_file(file)
    assert_holds(config, dumped)
    assert [record for record in caplog.records if record.name.startswith("groupwise")] == []
