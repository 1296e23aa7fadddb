//! Crash
