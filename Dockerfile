# docker build -t mjp .                              PyTorch for CPUs
# docker build -t mjp --build-arg TORCH=cu130 .      for NVIDIA GPUs: the host's driver, and --gpus all to run
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" mjp demo
#
# PyTorch's wheels bring CUDA with them, so that a plain Python is the base of both; another one, such as
# an nvidia/cuda image with Python and pip in it, is --build-arg BASE=IMAGE.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG TORCH=cpu
WORKDIR /src
COPY constraints.txt .
RUN python3 -m pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" \
      -c constraints.txt torch torchvision

COPY . .
RUN python3 -m pip install --no-cache-dir -c constraints.txt .

# Whoever --user is has no home: what libraries keep goes where everybody may write.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /work
USER 65534
ENTRYPOINT ["mjp"]
CMD ["--help"]
