//! Frees unlinked and trimmed file content in bounded steps.
