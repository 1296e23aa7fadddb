//! A storage that records every unsynced operation and can crash: drops, tears per 512 bytes and reorders what no barrier covered.
