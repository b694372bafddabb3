from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, SecretStr, ValidationError, model_validator

from decant.command.generate import TOKEN
from decant.runtime.settings import InvalidSettings, SettingError, Settings
from decant.runtime.settings_sources import load, load_or_exit


class Part(Settings):
    port: int = Field(8000, ge=0, le=65535, description="where it listens")


class Whole(Part):
    name: str = Field("router", description="its name, 100% free")
    mode: Literal["fast", "safe"] = Field("safe", description="how")
    eager: bool = Field(False, description="at once")
    share: float | None = Field(None, gt=0, le=1, description="of the memory")
    folder: Path | None = Field(None, description="of the model")
    models: tuple[str, ...] = Field((), description="what is served")
    key: SecretStr | None = Field(None, min_length=8, description="for clients")

    @model_validator(mode="after")
    def _together(self) -> "Whole":
        if self.eager and self.mode == "safe":
            raise SettingError("eager", "only where mode is fast", self.eager)
        return self


def test_flags_beat_the_environment_that_beats_the_file_that_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "decant.toml"
    file.write_text('port = 1\nname = "file"\nmode = "fast"\nmodels = ["a", "b"]\n')
    environ = {"DECANT_PORT": "2", "DECANT_NAME": "environment", "DECANT_CONFIG": str(file), "HOME": "/"}
    settings = load(Whole, ["--port", "3", "--eager"], environ)
    assert (settings.port, settings.name, settings.mode) == (3, "environment", "fast")
    assert (settings.eager, settings.models, settings.share) == (True, ("a", "b"), None)


def test_values_are_typed_wherever_they_come_from() -> None:
    settings = load(
        Whole,
        ["--share=0.5", "--folder", "/models/a", "--mode", "fast"],
        {"DECANT_EAGER": "true", "DECANT_MODELS": "a, b", "DECANT_KEY": "12345678"},
    )
    assert (settings.share, settings.folder, settings.eager) == (0.5, Path("/models/a"), True)
    assert settings.models == ("a", "b")
    assert settings.key is not None
    assert "12345678" not in repr(settings)
    assert load(Whole, ["--no-eager"], {"DECANT_EAGER": "1"}).eager is False


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load(Whole, [], {}).port = 1


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--prot", "1"], {}, "--prot: no such setting; did you mean --port?"),
        (["--por=1"], {}, "--por: no such setting"),
        (["stray"], {}, "stray: no such setting"),
        (["--port"], {}, "command line: argument --port: expected one argument"),
        ([], {"DECANT_PROT": "1"}, "DECANT_PROT: no such variable; did you mean DECANT_PORT?"),
        ([], {"DECANT_REDIS_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        (["--port", "70000"], {}, "--port: should be less than or equal to 65535, got 70000"),
        ([], {"DECANT_PORT": "many"}, "DECANT_PORT: should be a valid integer"),
        (["--mode", "slow"], {}, "--mode: should be 'fast' or 'safe', got slow"),
        ([], {"DECANT_EAGER": "1"}, "DECANT_EAGER: only where mode is fast, got True"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml: a readable TOML file"),
    ],
)
def test_a_refusal_names_the_given_value(arguments: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        load(Whole, arguments, environ)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "decant.toml: prot: no such key; did you mean port?"),
        ("port = 70000", "decant.toml: port: should be less than or equal to 65535, got 70000"),
        ("[section]\nport = 1", "decant.toml: section: no such key"),
        ("port 1", "decant.toml: a readable TOML file"),
    ],
)
def test_a_file_is_refused_by_key(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "decant.toml"
    file.write_text(content)
    with pytest.raises(InvalidSettings) as refused:
        load(Whole, ["--config", str(file)], {})
    assert message in str(refused.value)


def test_all_errors_are_reported_at_once_without_secrets() -> None:
    with pytest.raises(InvalidSettings) as refused:
        load(Whole, ["--port=-1"], {"DECANT_SHARE": "2", "DECANT_KEY": "hunter2"})
    assert [violation.field for violation in refused.value.violations] == ["--port", "DECANT_SHARE", "DECANT_KEY"]
    assert "hunter2" not in str(refused.value)


def test_a_variable_of_another_program_may_be_passed_over() -> None:
    assert load(Whole, [], {"DECANT_ADDRESS": "x"}, ignore={"DECANT_ADDRESS"}).port == 8000


def test_help_is_made_of_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Whole, ["--help"], {}, program="decant router")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        "usage: decant router",
        "--port N where it listens; default 8000 [DECANT_PORT]",
        "--mode fast|safe",
        "--eager, --no-eager",
        "its name, 100% free; default router [DECANT_NAME]",
        "--config FILE",
    ):
        assert expected in text


def test_a_main_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_or_exit(Whole, ["--prot=1"], program="decant router")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "decant router: --prot: no such setting; did you mean --port?\n"


def test_a_missing_required_setting_is_refused() -> None:
    class Needy(Settings):
        model: str = Field(description="what to serve")

    with pytest.raises(InvalidSettings, match="--model or DECANT_MODEL: is needed"):
        load(Needy, [], {})


def test_the_options_of_the_command_are_no_unknown_settings() -> None:
    assert load(Whole, [], {TOKEN: "s3cret"}) == load(Whole, [], {})
