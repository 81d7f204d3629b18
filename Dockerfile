# What a job in a container needs: NVIDIA's PyTorch, the dependencies in requirements.txt that it does not have, the code.
# aux/submit.py builds it, of the files that git knows, when Slurmfile.toml says packaging type = "container".
# Another base, which has to have Python 3.11 and pip: build_args = ["BASE=debian:bookworm"] there.
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}
WORKDIR /workspace

RUN python3 -m pip install --no-cache-dir --break-system-packages uv
COPY requirements.txt .
# A torch that the base has is built for its CUDA, and stays: an override that never applies takes a package off the list.
RUN touch /tmp/keep; \
    for package in torch torchvision; do \
        ! python3 -c "import $package" 2>/dev/null || echo "$package; python_version < '0'" >>/tmp/keep; \
    done; \
    uv pip install --system --break-system-packages --no-cache --override /tmp/keep --requirement requirements.txt
# Enroot sets what it finds here, where Docker has its ENV.
RUN env | grep -Ev '^(HOME|HOSTNAME|OLDPWD|PWD|SHLVL|TERM|_)=' >/etc/environment

COPY . .
