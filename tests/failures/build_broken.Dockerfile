# docker build --file tests/failures/build_broken.Dockerfile .
# The build sees this folder less what .dockerignore names, and data is in there.
FROM scratch
COPY data /workspace/data
