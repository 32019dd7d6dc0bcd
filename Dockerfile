# docker build -t stabilize .
# docker run --rm -v "$PWD/runs:/home/stabilize/runs" stabilize fit -c configs/quickstart.yaml
# With CUDA: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t stabilize .
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 stabilize
WORKDIR /home/stabilize

# Dependencies before source, torch before the rest: an edit to the source installs nothing again.
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN grep '^torch[<>=]' requirements.txt > torch.txt && pip install --index-url "${TORCH_INDEX}" -r torch.txt
RUN pip install -r requirements.txt

COPY . .
RUN pip install --no-deps --editable .

USER 1000
ENTRYPOINT ["stabilize"]
CMD ["--help"]
