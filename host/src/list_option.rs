//! Options of comma-separated lists (`-o`, `--remote`): their parser, their help, completions and the
//! text of `status` read the same row.

use std::fmt::Display;
use std::ops::RangeInclusive;

use lockbox_terminal::quantity;

/// Column of the texts in a help, after the names.
const NAME_COLUMNS: usize = 31;
const HELP_COLUMNS: usize = 80;

/// Kind of value that follows an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionValue {
    Nothing,
    /// One of these.
    OneOf(&'static [&'static str]),
    /// The path of a file.
    File,
    /// Other text: its name in the help, and examples.
    Text(&'static str, &'static [&'static str]),
}

/// Option of a list that sets a field of `T`.
pub struct ListOption<T> {
    /// Name in the manual; a list may have underscores in the place of its dashes.
    pub name: &'static str,
    pub value: OptionValue,
    set: fn(&mut T, GivenValue<'_>) -> Result<(), String>,
    /// Value of an option without one.
    implied: Option<&'static str>,
    shown: Option<(u8, Formatter<T>)>,
    /// Shared with the options before it that have none.
    help: &'static str,
}

/// Formats the value in a `T`; None if the list leaves it out.
type Formatter<T> = fn(&T) -> Option<String>;

impl<T> ListOption<T> {
    pub const fn new(
        name: &'static str,
        value: OptionValue,
        set: fn(&mut T, GivenValue<'_>) -> Result<(), String>,
    ) -> ListOption<T> {
        ListOption { name, value, set, implied: None, shown: None, help: "" }
    }

    /// Adds the value that the name alone stands for.
    pub(crate) const fn implies(self, value: &'static str) -> ListOption<T> {
        ListOption { implied: Some(value), ..self }
    }

    /// Adds the text of the value, empty for a flag, and its position in [`list_of`].
    pub const fn shown(self, position: u8, text: Formatter<T>) -> ListOption<T> {
        ListOption { shown: Some((position, text)), ..self }
    }

    pub const fn help(self, help: &'static str) -> ListOption<T> {
        ListOption { help, ..self }
    }

    fn usage(&self) -> String {
        match self.value {
            OptionValue::Nothing => self.name.to_owned(),
            OptionValue::OneOf(words) => format!("{}={}", self.name, words.join("|")),
            OptionValue::File => format!("{}=FILE", self.name),
            OptionValue::Text(kind, _) => format!("{}={kind}", self.name),
        }
    }
}

/// Sets a field of the options.
pub fn set<V>(field: &mut V, value: V) -> Result<(), String> {
    *field = value;
    Ok(())
}

/// Applies one option of a list; returns false if the table does not have it.
///
/// # Errors
/// A sentence about the value.
pub fn apply<T>(table: &[ListOption<T>], option: &str, to: &mut T) -> Result<bool, String> {
    let (name, text) = option.split_once('=').map_or((option, None), |(name, text)| (name, Some(text)));
    let is_named = |row: &&ListOption<T>| row.name == name || row.name.replace('-', "_") == name;
    let Some(row) = table.iter().find(is_named) else { return Ok(false) };
    let text = text.or(row.implied);
    if text.is_none() != (row.value == OptionValue::Nothing) {
        return Ok(false);
    }
    let mut given = GivenValue { name, text: text.unwrap_or_default(), position: 0 };
    if let OptionValue::OneOf([words @ .., last]) = row.value {
        let position = words.iter().chain([last]).position(|word| *word == given.text);
        given.position = given.parsed(position, format!("{} or {last}", words.join(", ")))?;
    }
    (row.set)(to, given).map(|()| true)
}

/// Formats the list that sets these values.
pub fn list_of<T>(table: &[ListOption<T>], values: &T) -> String {
    let shown = |row: &ListOption<T>| {
        let (position, text) = row.shown?;
        let equals = if row.value == OptionValue::Nothing { "" } else { "=" };
        text(values).map(|text| (position, format!("{}{equals}{text}", row.name)))
    };
    let mut options: Vec<_> = table.iter().filter_map(shown).collect();
    options.sort_unstable();
    options.into_iter().map(|(_, option)| option).collect::<Vec<_>>().join(",")
}

/// Returns the options as a help text names them.
pub fn usage<T>(table: &[ListOption<T>]) -> String {
    table.iter().map(ListOption::usage).collect::<Vec<_>>().join(", ")
}

/// Lays out the help, but for the options after the last one with a text.
pub fn help<T>(table: &[ListOption<T>]) -> String {
    let indented = format!("\n{:NAME_COLUMNS$}", "");
    let (mut help, mut names) = (String::new(), String::from(" "));
    for row in table {
        let name = format!(" {}{}", row.usage(), if row.help.is_empty() { "," } else { "" });
        if names.rsplit('\n').next().unwrap_or_default().len() + name.len() >= HELP_COLUMNS {
            names += "\n ";
        }
        names += &name;
        if !row.help.is_empty() {
            let gap = if names.len() < NAME_COLUMNS { "" } else { &indented };
            help += &format!("{names:NAME_COLUMNS$}{gap}{}\n", row.help.replace('\n', &indented));
            names = " ".to_owned();
        }
    }
    help
}

/// Value in a list, and the name that it was given for.
pub struct GivenValue<'a> {
    name: &'a str,
    pub text: &'a str,
    /// Position among the values of [`OptionValue::OneOf`].
    pub position: usize,
}

impl GivenValue<'_> {
    /// Returns the parsed value, or an error with all that are valid.
    pub fn parsed<V>(&self, value: Option<V>, valid: impl Display) -> Result<V, String> {
        value.ok_or_else(|| format!("{}= takes {valid}, not '{}'", self.name, self.text))
    }

    pub fn number(&self, valid: RangeInclusive<u64>) -> Result<u64, String> {
        let number = self.text.parse().ok().filter(|number| valid.contains(number));
        self.parsed(number, format!("a number from {} to {}", valid.start(), valid.end()))
    }

    pub fn size(&self, least: u64) -> Result<u64, String> {
        let bytes = quantity::size(self.text).filter(|bytes| *bytes >= least);
        self.parsed(bytes, format!("a size such as 64M or 1G, {} MiB at least", least >> 20))
    }

    /// Returns a sentence that begins with the name.
    pub fn explain(&self, why: impl Display) -> String {
        format!("{}= {why}", self.name)
    }
}
