from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.core.settings import ModelSettings
from gateway.served_model import ServedModel, load_served_model
from gateway.tokenization import Tokenizer
from tests.fixtures.model import MODEL_FOLDER
from tests.integration.gateway.harness import Deployment, Options, deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.coordination.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_FOLDER)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ServedModel:
    return load_served_model(ModelSettings(path=MODEL_FOLDER, name="smol"), tokenizer, default_max_tokens=512)


@pytest.fixture
def options() -> Options:
    return Options()


@pytest.fixture
async def deployment(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer, options: Options
) -> AsyncIterator[Deployment]:
    """A gateway with one worker of each role; after the test nothing may be held."""
    async with deployed(redis_server.url, model, tokenizer, options) as parts:
        yield parts
        await parts.assert_idle()
