//! Opens the store: the built-in one, or a Valkey server with a local spool.

use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;

use lockbox_share::store::env::SystemClock;
use lockbox_share::store::segments::{self, SegmentStore};
use lockbox_share::store::spool::Spool;
use lockbox_share::store::valkey::{ValkeySettings, ValkeyStore};
use lockbox_share::store::{Durability, Periods, ShareStore};
use zeroize::Zeroizing;

use super::options::Serve;

pub(super) type Stores = (Arc<dyn ShareStore>, Arc<Spool>);

/// The store that the options name, and the spool of this daemon.
pub(super) fn open(arguments: &Serve) -> Result<Stores, String> {
    let state = &arguments.state_dir;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(|error| format!("cannot create {}: {error}", state.display()))?;
    let durability = arguments.durability.into();
    if let Some(url) = &arguments.store {
        return open_valkey(url, arguments, durability);
    }
    let settings = segments::SegmentSettings {
        durability,
        spool_capacity: arguments.spool_size,
        ..segments::SegmentSettings::default()
    };
    let store = SegmentStore::open(state, &settings).map_err(|error| error.to_string())?;
    let spool = store.spool().cloned().ok_or("the store has no spool")?;
    let store: Arc<dyn ShareStore> = Arc::new(store);
    Ok((store, spool))
}

fn open_valkey(url: &str, arguments: &Serve, durability: Durability) -> Result<Stores, String> {
    let password = arguments
        .store_password_file
        .as_ref()
        .map(|path| {
            let text = std::fs::read_to_string(path).map(Zeroizing::new);
            let text = text.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Ok::<_, String>(Zeroizing::new(text.trim_end_matches('\n').to_owned()))
        })
        .transpose()?;
    let settings = ValkeySettings {
        url: url.to_owned(),
        password,
        durability,
        periods: Periods::default(),
        clock: Arc::new(SystemClock),
    };
    let mut store = ValkeyStore::connect(&settings).map_err(|error| error.to_string())?;
    let directory = arguments.state_dir.join("spool");
    // Daemons that serve the same links may share it.
    let spool = Spool::open_shared(&directory, arguments.spool_size)
        .map_err(|error| format!("cannot open {}: {error}", directory.display()))?;
    store.sweep_in_background(spool.clone()).map_err(|error| error.to_string())?;
    let store: Arc<dyn ShareStore> = Arc::new(store);
    Ok((store, spool))
}
