# docker build --file docs/labs/build_broken.Dockerfile .
# The build sees this folder less what .dockerignore names, and data is in there.
FROM scratch
COPY data /workspace/data
