# zeroshard with its command and its examples:
#
#   docker build -t zeroshard .
#   docker run --rm --shm-size 2g zeroshard train --ranks 2 --time-limit 60
#
# This image has not been built yet, since the authors had no Docker. tests/test_package.py builds the wheel from the files
# that are copied here, and runs it.
#
# GPUs: untested. The torch that pip finds for Linux on x86-64 has CUDA's libraries with it, so that the host needs a driver
# and NVIDIA's container toolkit alone: docker run --gpus all --shm-size 2g zeroshard train
# CPUs alone: a build of torch without CUDA is smaller by gigabytes. pytorch.org names the index that has it:
# docker build --build-arg TORCH_INDEX=... -t zeroshard .
FROM python:3.12-slim

WORKDIR /zeroshard
COPY requirements requirements
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements/torch.txt
RUN pip install --no-cache-dir -r requirements/cli.txt

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps .
COPY examples examples

# runs/ is written here
RUN useradd --create-home zeroshard && chown zeroshard /zeroshard
USER zeroshard
ENTRYPOINT ["zeroshard"]
CMD ["--help"]
