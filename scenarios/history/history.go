// Package history holds what happened in a run as a list of events, and judges it.
//
// The judge is separate from the run: it sees events only, so that a recorded history can be judged again without
// servers, and a hand-made bad one proves that it catches.
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

// Fencing says how much of the fencing protocol a run used.
type Fencing string

// The fencing modes. Writes alone do not protect a read-modify-write: a stale holder that wakes after its successor
// has read and before it has written is still accepted, and its entry is lost.
const (
	FencingOff    Fencing = "off"    // the resource accepts everything
	FencingWrites Fencing = "writes" // writes carry the token, reads don't
	FencingOn     Fencing = "on"     // a grant's first read raises the fence too
)

// Kind tells what an [Event] is about.
type Kind string

// The kinds of events.
const (
	KindRun      Kind = "run"      // the first event: what is run, in Run
	KindReport   Kind = "report"   // a worker reached a checkpoint or tells an outcome, in Name
	KindFault    Kind = "fault"    // the controller injected or healed a fault; Name and Target
	KindDecision Kind = "decision" // the resource accepted or refused; Op, Fence, Seen, Accepted, Value
	KindDoubt    Kind = "doubt"    // the times show that the hazard never came about; Detail says how
	KindFinal    Kind = "final"    // the resource's value after the run; Value, Seen
	KindEnd      Kind = "end"      // the last event: the history is complete
)

// Names of reports.
const (
	Held        = "held"         // a try found the lock held by another
	Acquired    = "acquired"     // Token, TTL and Until are set
	Read        = "read"         // Value is what was read
	ReadStale   = "read-stale"   // the fenced read was refused
	Checked     = "checked"      // the worker looked at its lease and found it held
	BeforeWrite = "before-write" // the value to write is computed
	Sent        = "sent"         // the write has left the process
	Wrote       = "wrote"        // the resource accepted the write
	WriteStale  = "write-stale"  // the resource refused the write (409)
	ReleaseGap  = "release-gap"  // between the check and the delete of a release that is not atomic
	Released    = "released"     // the lock was released by its owner
	ReleaseLost = "release-lost" // the lock was no longer the worker's to release, and was left alone
	// ReleaseForeign tells that a release freed another owner's lock.
	ReleaseForeign = "release-foreign"
	LostLease      = "lost-lease" // the worker looked at its lease, found it lost and gave up
	Lost           = "lost"       // the worker saw its lease end, and goes on all the same; Until is when it ended
	Failed         = "failed"     // the worker met an error that is no outcome; Error is set
	Done           = "done"       // the worker has ended
)

// Event is one line of a history. Fields that don't belong to its Kind are zero and left out of the JSON.
type Event struct {
	Time  time.Time `json:"time"`            // the actor's wall clock; for drawing, never for judging
	Actor string    `json:"actor"`           // a worker's name, "resource" or "controller"
	Kind  Kind      `json:"kind"`            //
	Name  string    `json:"name,omitempty"`  // of a report or fault
	Error string    `json:"error,omitempty"` // of a report

	Run *Run `json:"run,omitempty"`

	Target string   `json:"target,omitempty"` // of a fault: a worker's name, "resource", or that of a server of the lock's
	Peers  []string `json:"peers,omitempty"`  // of a cut: from which servers
	Detail string   `json:"detail,omitempty"` // of a fault: its size, where it has one

	Token uint64    `json:"token,omitempty"` // the grant's fencing token
	TTL   Duration  `json:"ttl,omitempty"`   // of an acquired report: the lease
	Until time.Time `json:"until,omitzero"`  // of an acquired report: when the lease ends unless it is renewed; of a lost one: when it did

	Op       string `json:"op,omitempty"`       // of a decision: "read" or "write"
	Key      string `json:"key,omitempty"`      // of a decision, final or acquired report: the ledger's, or the lock's
	Seq      uint64 `json:"seq,omitempty"`      // of a decision: the write's number under its grant
	Seen     uint64 `json:"seen,omitempty"`     // of a decision or final: the greatest token accepted before
	SeenSeq  uint64 `json:"seen_seq,omitempty"` //
	Accepted bool   `json:"accepted,omitempty"` // of a decision
	Enforced bool   `json:"enforced,omitempty"` // of a decision: the fence was looked at
	Value    string `json:"value,omitempty"`    // of a decision, a read report or final: the ledger
	Stale    int    `json:"rejected,omitempty"` // of final: the resource's count of refusals, from its metrics
}

// Run says what a history is the history of.
type Run struct {
	Scenario string   `json:"scenario"`
	Hazard   string   `json:"hazard"`
	Fencing  Fencing  `json:"fencing"`
	Lock     string   `json:"lock"`    // the lock and how it was driven, e.g. "redis"
	Server   string   `json:"server"`  // the lock's server and where it came from, e.g. "redis 7.0.15 (containers)"
	Store    string   `json:"store"`   // e.g. "bolt"
	TTL      Duration `json:"ttl"`     // the lease of the worker that the fault hits
	Pause    Duration `json:"pause"`   // the shortest freeze asked for; 0: as long as it takes
	Workers  []string `json:"workers"` // in the order of their first step
	// Keys are the ledgers, where there are several.
	Keys []string `json:"keys,omitempty"`
	// TokensLost says that the hazard takes the lock's source of tokens back, so that they go backwards.
	TokensLost bool   `json:"tokens_lost,omitempty"`
	Command    string `json:"command"` // repeats this run
}

// Duration is a time.Duration that reads and writes as text, "1.5s".
type Duration time.Duration

// MarshalText writes d as time.Duration prints it.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
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

// maxLine bounds a line of a history: no honest event comes near it.
const maxLine = 8 << 20

// Decode reads JSON lines. A line that is not an event is an error that names the line; nothing but blank lines is
// skipped.
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
			return nil, fmt.Errorf("history: line %d: it goes on after the event", n)
		}
		events = append(events, e)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("history: line %d: %w", n, err)
	}
	return events, nil
}
