# docker build -t mjp .                                    PyTorch as pip takes it: for NVIDIA GPUs, the host's driver,
#                                                          and --gpus all to run
# docker build -t mjp --build-arg TORCH_INDEX=ADDRESS .    PyTorch from the index of its CPU builds, a tenth of the size;
#                                                          its site names the address
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" mjp demo
#
# PyTorch's wheels bring CUDA with them, so that a plain Python is the base of both; another one, such as
# an nvidia/cuda image with Python and pip in it, is --build-arg BASE=IMAGE.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt .
RUN python3 -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
      -c constraints.txt torch torchvision

COPY . .
RUN python3 -m pip install --no-cache-dir -c constraints.txt .

# Whoever --user is has no home: what libraries keep goes where everybody may write.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /work
USER 65534
ENTRYPOINT ["mjp"]
CMD ["--help"]
