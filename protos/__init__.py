"""The contract: .proto files and their code, errors, channels and servers, page hashes. Imports nothing of ours."""
