# Two targets: `docker build --target cpu .` and `docker build --target cuda .` (the default).
# CUDA comes from JAX's wheels; the host needs an NVIDIA driver of 580 or newer and the container toolkit.
FROM python:3.12-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY jaxpaged jaxpaged
COPY pallas_kernels pallas_kernels
COPY server server
RUN useradd --create-home --uid 1000 jaxpaged \
    && mkdir -p /home/jaxpaged/.cache/jaxpaged /home/jaxpaged/.cache/huggingface \
    && chmod 700 /home/jaxpaged/.cache/jaxpaged \
    && chown -R jaxpaged:jaxpaged /home/jaxpaged
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["python", "-m", "server"]
CMD ["--help"]

FROM base AS cpu
RUN pip install --constraint constraints.txt .
USER jaxpaged

FROM base AS cuda
RUN pip install --constraint constraints.txt ".[cuda13]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER jaxpaged
