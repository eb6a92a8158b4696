# docker build -t lookfar . && docker run -p 8000:8000 -v lookfar-cache:/cache lookfar
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
# numba and torch need nothing from the system; models are downloaded into the volume.
RUN useradd --create-home --uid 1000 lookfar && mkdir /cache && chown lookfar /cache
WORKDIR /app

# torch first and by exact version; for a GPU build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install "$(grep '^torch==' constraints.txt)" --index-url "$TORCH_INDEX"
COPY src ./src
RUN pip install --constraint constraints.txt ".[demo,serve,redis]"

USER lookfar
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
STOPSIGNAL SIGTERM
# Reachable from outside of the container only: give LOOKFAR_API_KEYS, or mount a file and add --keys.
ENTRYPOINT ["lookfar", "serve", "--host", "0.0.0.0", "--log", "json"]
CMD ["demo", "--store", "/cache/answers.store"]
