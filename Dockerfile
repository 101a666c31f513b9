# One image for all processes; the command says which.
#
#     docker build -t baton .
#
# For CPU-only machines let pip look at PyTorch's index of CPU builds too: --build-arg PIP_EXTRA_INDEX_URL=<its address>
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:${PATH}
COPY constraints.txt pyproject.toml ./
# The biggest layer first: it changes only with its pin.
RUN pip install -c constraints.txt torch setuptools
COPY . .
RUN pip install -c constraints.txt --no-build-isolation '.[local]'

# The sample model, in a stage of its own: built only when asked for, `docker build --target model`.
FROM build AS model
RUN python scripts/fetch_model.py /models/SmolLM2-135M-Instruct

FROM python:3.11-slim AS serve
# The engine compiles its decode kernels for the processor that it meets.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/baton /opt/baton
# An ordinary user: the same in all containers, because shared-memory segments are readable by their owner only.
RUN useradd --system --uid 8470 --create-home baton
USER baton
WORKDIR /home/baton
ENV PATH=/opt/baton/bin:${PATH} PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
CMD ["python", "-m", "gateway"]
