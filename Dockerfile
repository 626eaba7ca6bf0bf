# Two images from one file, each with the wheel of this source and the versions of constraints.txt:
#   docker build --target cpu -t stillroom:cpu .
#   docker build --target cuda -t stillroom:cuda .
#   docker run --rm -v "$PWD:/work" stillroom:cpu distill --dry-run --out runs/try
#   docker run --rm --gpus all -v "$PWD:/work" stillroom:cuda selftest
# A mounted folder must be writable for user 1000, or give `--user "$(id -u):$(id -g)"`.

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md constraints.txt ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt build && python -m build --wheel --outdir /wheels

FROM python:3.12-slim-bookworm AS base
# g++ builds the row kernel of the head on a CPU, and what torch.compile generates on either device.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 stillroom
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
# Compiled kernels and downloaded models go to /home/stillroom/.cache: mount it to keep them.

FROM base AS cpu
RUN pip install --no-cache-dir -c /constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir -c /constraints.txt /wheels/*.whl
USER 1000
WORKDIR /work
ENTRYPOINT ["stillroom"]
CMD ["--help"]

# The index's own torch for Linux brings its CUDA libraries: the host needs a driver and NVIDIA's container toolkit.
FROM base AS cuda
RUN pip install --no-cache-dir -c /constraints.txt /wheels/*.whl
USER 1000
WORKDIR /work
ENTRYPOINT ["stillroom"]
CMD ["--help"]
