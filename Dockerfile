# What a job in a container needs: NVIDIA's PyTorch, the dependencies of requirements.txt that it lacks, the code.
# `docker build .` takes the folder without what .dockerignore lists. local/laptop takes the files that git lists, if
# Slurmfile.toml says packaging type = "container".
# Another base must have Python 3.10 and pip: --build-arg BASE=debian:bookworm, or build_args in Slurmfile.toml.
ARG BASE=nvcr.io/nvidia/pytorch:26.09-py3
FROM ${BASE}
WORKDIR /workspace

RUN python3 -m pip install --no-cache-dir --break-system-packages uv
COPY requirements.txt .
# The torch of the base stays: it is built for its CUDA. An override that never applies removes a package from the list.
RUN touch /tmp/keep; \
    for package in torch torchvision; do \
        ! python3 -c "import $package" 2>/dev/null || echo "$package; python_version < '0'" >>/tmp/keep; \
    done; \
    uv pip install --system --break-system-packages --no-cache --override /tmp/keep --requirement requirements.txt
# Enroot reads the environment from this file, not from the image's ENV.
RUN env | grep -Ev '^(HOME|HOSTNAME|OLDPWD|PWD|SHLVL|TERM|_)=' >/etc/environment

COPY . .
