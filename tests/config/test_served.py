"""Laws of the section that says how a teacher on a server is asked."""

from __future__ import annotations

import pytest
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError


@pytest.mark.parametrize("url", ["http://box:8000", "https://host/models/v1", "http://[::1]:8000"])
def test_an_address_is_scheme_host_port_and_path(url: str) -> None:
    assert load_config(overrides={"teacher.server": url}).teacher.server == url


@pytest.mark.parametrize("url", ["box:8000", "ftp://box", "http://", "http://box:port", "/tmp/socket", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with refused(ConfigError, "", "teacher.server"):
        load_config(overrides={"teacher.server": url})


@pytest.mark.parametrize("url", ["http://me:sesame@box", "http://box/?key=sesame", "http://box/#sesame"])
def test_a_secret_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with refused(ConfigError, "", "teacher.requests.api_key_variable") as caught:
        load_config(overrides={"teacher.server": url})
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("kind", ["dense", "sampled", "hybrid", "target"])
def test_signals_of_the_whole_distribution_are_refused(kind: str) -> None:
    with refused(ConfigError, "", "teacher.signal.kind"):
        load_config(overrides={"teacher.server": "http://box:8000", "teacher.signal.kind": kind})
