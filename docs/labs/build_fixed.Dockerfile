# docker build --file docs/labs/build_fixed.Dockerfile .
# The image holds code. Data come in when it is started: docker run --volume "$PWD/data:/workspace/data"
FROM scratch
COPY distributed /workspace/distributed
