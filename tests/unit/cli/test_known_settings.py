"""The core's list of what components have is what they have: the command line alone sees them all."""

from __future__ import annotations

from baton.core.known_settings import COMPONENT_SETTINGS, COMPONENTS, SHARED_SECTIONS
from decode_worker.settings import DecodeWorkerSettings
from gateway.settings import GatewaySettings
from prefill_worker.settings import PrefillWorkerSettings


def test_every_top_level_setting_of_every_component_is_known():
    components = (GatewaySettings, PrefillWorkerSettings, DecodeWorkerSettings)
    assert [component.class_name for component in components] == list(COMPONENTS)
    found = {name for component in components for name in component.model_fields}
    assert found == {*SHARED_SECTIONS, *COMPONENT_SETTINGS}
