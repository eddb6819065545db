# groupwise on a CPU, with the model of the quickstart:
#
#     docker build -t groupwise .
#     docker run --rm groupwise                         # make quickstart, about five minutes
#     docker run --rm -v "$PWD:/run" -w /run groupwise groupwise train --config run.yaml
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /groupwise
COPY . .
RUN make .venv/quickstart
ENV PATH=/groupwise/.venv/bin:$PATH
CMD ["make", "quickstart"]
