//! The sealed side of one-time links: seals a file, speaks to the daemon, opens what was received.

#![forbid(unsafe_code)]
