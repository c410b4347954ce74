# The template in a container, in its pinned versions. The image holds the code; data and logs stay outside:
#   docker build -t cait .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/data:/cait/data" -v "$PWD/logs:/cait/logs" cait train RUN=first
# On a machine without a GPU leave out --gpus all. The mounted folders must be writable for user 1000.
FROM python:3.11-slim

RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 cait \
 && install --directory --owner cait /cait /cait/data /cait/logs
USER cait
# The key that signs runs lies beside them, so that the next container knows them for its own.
ENV XDG_CONFIG_HOME=/cait/logs/.config
WORKDIR /cait

# The packages first: they change seldom, and take longest.
COPY --chown=cait pyproject.toml constraints*.txt README.md LICENSE Makefile ./
COPY --chown=cait scripts ./scripts
COPY --chown=cait src ./src
RUN make .venv/.ready && rm -rf ~/.cache
COPY --chown=cait . .
RUN touch .venv/.ready

ENTRYPOINT ["make"]
CMD ["help"]
