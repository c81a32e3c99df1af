// Package history defines the events of a run and judges them. The judge sees nothing else, so recorded and hand-made histories
// can be judged too.
package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Fencing is a fencing mode.
type Fencing string

// The fencing modes, see docs/design.md.
const (
	FencingOff    Fencing = "off"    // the resource accepts everything
	FencingWrites Fencing = "writes" // writes carry the token, reads don't
	FencingOn     Fencing = "on"     // reads carry the token too, and raise the fence
)

// Kind is an [Event]'s kind.
type Kind string

// The kinds of events.
const (
	KindRun      Kind = "run"
	KindReport   Kind = "report"   // of a worker: a checkpoint or an outcome; Name
	KindFault    Kind = "fault"    // injected or undone by the controller; Name and Target
	KindDecision Kind = "decision" // of the resource; Op, Token, Seq, Seen, Accepted, Value
	KindDoubt    Kind = "doubt"    // times show that the hazard did not happen; Detail
	KindFinal    Kind = "final"    // the resource's value after the run; Value, Seen
	KindEnd      Kind = "end"
)

// Names of reports.
const (
	Held        = "held"       // a try found the lock held
	Acquired    = "acquired"   // Token, TTL and Until are set
	Read        = "read"       // Value is set
	ReadStale   = "read-stale" // the fenced read was refused
	Checked     = "checked"    // the worker's lease was still held
	BeforeWrite = "before-write"
	Sent        = "sent" // about to write, and the network will hold the write
	Wrote       = "wrote"
	WriteStale  = "write-stale"
	ReleaseGap  = "release-gap"  // between the check and the delete of a non-atomic release
	Released    = "released"     // by its owner
	ReleaseLost = "release-lost" // the worker no longer had the lock, and left it alone
	// ReleaseForeign: the release freed another owner's lock.
	ReleaseForeign = "release-foreign"
	LostLease      = "lost-lease" // the worker found its lease lost, and gave up
	Lost           = "lost"       // the worker saw its lease end, at Until, and continues
	Failed         = "failed"     // with Error
	Done           = "done"
)

// Event is one line of a history. Fields that don't apply to its Kind are zero and not in the JSON.
type Event struct {
	Time  time.Time `json:"time"`            // the actor's wall clock; never used for judging
	Actor string    `json:"actor"`           // a worker's name, "resource" or "controller"
	Kind  Kind      `json:"kind"`            //
	Name  string    `json:"name,omitempty"`  // of a report or fault
	Error string    `json:"error,omitempty"` // of a report

	Run *Run `json:"run,omitempty"`

	Target string   `json:"target,omitempty"` // of a fault: a worker, "resource" or a server
	Peers  []string `json:"peers,omitempty"`  // of a cut: from which servers
	Detail string   `json:"detail,omitempty"` // of a fault: its size or kind

	Token uint64    `json:"token,omitempty"` // the grant's
	TTL   Duration  `json:"ttl,omitempty"`   // of an acquired report
	Until time.Time `json:"until,omitzero"`  // of an acquired report: when the lease ends unless renewed; of a lost one: when it ended

	Op       string `json:"op,omitempty"`       // of a decision: "read" or "write"
	Key      string `json:"key,omitempty"`      // the ledger's; of an acquired report: the lock's
	Seq      uint64 `json:"seq,omitempty"`      // of a decision: the number of the call under its grant
	Seen     uint64 `json:"seen,omitempty"`     // of a decision or final: the greatest token accepted before
	SeenSeq  uint64 `json:"seen_seq,omitempty"` //
	Accepted bool   `json:"accepted,omitempty"` // of a decision
	Enforced bool   `json:"enforced,omitempty"` // of a decision: the fence was checked
	Value    string `json:"value,omitempty"`    // of a decision, a read report or final: the ledger
	Refusals int    `json:"rejected,omitempty"` // of final: from the resource's metrics
}

// Run describes a history's run.
type Run struct {
	Scenario string   `json:"scenario"`
	Hazard   string   `json:"hazard"`
	Fencing  Fencing  `json:"fencing"`
	Lock     string   `json:"lock"`   // Service.Lock
	Server   string   `json:"server"` // e.g. "redis 7.0.15 (containers)"
	Store    string   `json:"store"`
	TTL      Duration `json:"ttl"`     // of the victim
	Pause    Duration `json:"pause"`   // minimum duration of a freeze; 0: until its undo
	Workers  []string `json:"workers"` // in the order of their first step
	// Keys are the ledgers, if several.
	Keys []string `json:"keys,omitempty"`
	// TokensLost says that the hazard makes tokens regress.
	TokensLost bool   `json:"tokens_lost,omitempty"`
	Command    string `json:"command"` // repeats this run
}

// Duration is a time.Duration with a text like "1.5s".
type Duration time.Duration

// D returns d as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText implements [encoding.TextMarshaler].
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%w: want a duration such as 50ms or 5s", err)
	}
	*d = Duration(v)
	return nil
}

// Encode writes events as JSON lines.
func Encode(w io.Writer, events []Event) error {
	enc := json.NewEncoder(w)
	for i := range events {
		if err := enc.Encode(&events[i]); err != nil {
			return fmt.Errorf("history: event %d: %w", i+1, err)
		}
	}
	return nil
}

const maxLine = 8 << 20

// Decode reads JSON lines and skips blank ones. Errors name the line.
func Decode(r io.Reader) ([]Event, error) {
	var events []Event
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxLine)
	n := 1
	for ; sc.Scan(); n++ {
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		dec := json.NewDecoder(bytes.NewReader(line))
		dec.DisallowUnknownFields()
		var e Event
		if err := dec.Decode(&e); err != nil {
			return nil, fmt.Errorf("history: line %d: %w", n, err)
		}
		if _, err := dec.Token(); !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("history: line %d: unexpected data after the event", n)
		}
		events = append(events, e)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("history: line %d: %w", n, err)
	}
	return events, nil
}
