from __future__ import annotations

import pytest
import typer

from baton.cli.request_flags import RequestFlags


@pytest.mark.parametrize("bias", ["7", "x=1", "7=", "-1=2", "4294967296=1"])
def test_a_bias_that_is_none_is_named(bias):
    with pytest.raises(typer.BadParameter, match=f"'{bias}' is not ID=VALUE"):
        RequestFlags(logit_bias=[bias]).request()


def test_what_is_not_given_is_not_set():
    request = RequestFlags().request()
    assert not request.sampling.ListFields()
    assert not request.stop.ListFields()
    assert not request.HasField("structure")
