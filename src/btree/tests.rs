//! Model test against BTreeMap.
