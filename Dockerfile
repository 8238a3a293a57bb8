# fullframe with CUDA: torch's wheels bring the CUDA runtime, so the base needs none, only the driver of the host.
#   docker build --tag fullframe .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/workspace" fullframe train recipe.py
FROM python:3.11.11-slim-bookworm AS build
COPY pyproject.toml constraints.txt README.md LICENSE /source/
COPY src /source/src
# The CPU tests' constraints hold for CUDA too: the package index gives the CUDA build of the same version of torch.
RUN python -m venv /opt/fullframe \
    && PIP_CONSTRAINT=/source/constraints.txt /opt/fullframe/bin/pip install --no-cache-dir "/source[data,gpus]"

FROM python:3.11.11-slim-bookworm
COPY --from=build /opt/fullframe /opt/fullframe
RUN useradd --create-home --uid 1000 fullframe && mkdir /workspace /runs && chown fullframe /workspace /runs
ENV PATH=/opt/fullframe/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number: Kubernetes does not know by a name that it is not root.
USER 1000
WORKDIR /workspace
ENTRYPOINT ["fullframe"]
CMD ["--help"]
