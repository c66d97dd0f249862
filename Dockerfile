# kerngen with a server in it, for a host with an NVIDIA driver of 12.9 or newer and the NVIDIA container toolkit:
#   docker build -t kerngen .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -e KERNGEN_API_KEYS=... -v kerngen:/home/kerngen kerngen \
#     serve google/gemma-4-31B-it-qat-w4a16-ct --host 0.0.0.0
# The volume keeps the checkpoint, compiled kernels and what was tuned. examples/serving/compose has a database and
# dashboards beside it.
ARG CUDA_IMAGE=nvidia/cuda:12.9.1-runtime-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/kerngen
ENV PATH=/opt/kerngen/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
# torch for CUDA names the versions of CUDA's packages itself: the constraints are for everything else.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu129
RUN pip install --index-url ${TORCH_INDEX} "$(grep '^torch==' constraints.txt)" \
    && grep -vE '^(torch|cuda-|nvidia-cuda-)' constraints.txt > /tmp/constraints.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kerngen kerngen
COPY runtime runtime
COPY templates templates
COPY tuning_db tuning_db
RUN pip install -c /tmp/constraints.txt '.[cuda12,serve,pg]'

FROM ${CUDA_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kerngen
COPY --from=build /opt/kerngen /opt/kerngen
ENV PATH=/opt/kerngen/bin:$PATH
USER kerngen
WORKDIR /home/kerngen
VOLUME /home/kerngen
EXPOSE 8000
# A first start downloads a checkpoint and builds its kernels before the port answers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kerngen"]
CMD ["doctor"]
