package scenarios

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Store is a protected store to which workers write straight, in the place of the HTTP resource: package pgstore's on
// PostgreSQL, for example. With fencing off they are clients that know nothing of fences.
//
// A store doesn't tell its decisions, and what a worker believes is no evidence. So the [Runner] reads the ledger's record from
// the store itself, by a connection of its own, before and after each step of a worker's; a run is serial, so that between two
// looks there is at most one call. What has changed in the record is what the store has accepted: a fence that has risen, a
// value that is another. A call that the worker tells of and that has changed nothing was refused, whatever the worker was told.
type Store struct {
	Name   string // of package stores: "postgres", "redis", "s3" or "dynamodb"
	Server string // what serves it, e.g. "postgres 15.10 (containers)"
	Addr   string // where it is, see stores.Open
	// Volatile says that the server loses its data when it is killed, so that a schedule that kills the resource shows nothing.
	Volatile bool
	// Kill ends the server by SIGKILL, and Restart starts it again on its data. Nil: that can't be had.
	Kill, Restart func(ctx context.Context) error
}

// container is the name of the bucket or table of the stores that need one.
const container = "fencelab-scenarios"

// OnServer is the store of that name on a server that runs for this process. Of a server that is the user's, what runs leave
// there stays: rows, keys, or objects with the name of the scenario. Redis is to be started with [DurableRedis].
func OnServer(store string, s *testbed.Server) *Store {
	st := &Store{Name: store, Server: s.String(), Addr: s.URL}
	if store == stores.S3 || store == stores.DynamoDB {
		st.Addr = store + "+" + s.URL + "/" + container
	}
	st.Volatile = store == stores.DynamoDB
	st.Kill = s.Kill
	st.Restart = func(ctx context.Context) error { return s.Restart(ctx, testbed.RestartOptions{}) }
	return st
}

// DurableRedis are the arguments of a Redis that keeps what it has answered for over a kill.
func DurableRedis() []string { return []string{"--appendonly", "yes", "--appendfsync", "always"} }

// check returns an error if sc can't be played over s. One that matches [errors.ErrUnsupported] says that nothing is wrong
// with either.
func (s *Store) check(sc *Scenario) error {
	if sc.has(OpKill, Resource) && s.Volatile {
		return fmt.Errorf("scenarios: %s: %s keeps nothing over a kill, and the store that it stands for does: %w", sc.Name, s.Server, errors.ErrUnsupported)
	}
	for _, name := range slices.Sorted(maps.Keys(sc.Workers)) {
		if sc.Workers[name].Second {
			return fmt.Errorf("scenarios: %s: worker %s has two ledgers, and over a store there is one: %w", sc.Name, name, errors.ErrUnsupported)
		}
	}
	return nil
}

// storeTarget is a [Store] during a run.
type storeTarget struct {
	*Store
	fencing history.Fencing
	tell    func(history.Event)

	client  *stores.Store
	key     string
	last    resource.Record   // what it held when it was looked at last
	offered map[string]string // by worker: the ledger that it is about to write
	refused int               // what workers were told, since the server was started last
	down    bool
}

func newStoreTarget(s *Store, f history.Fencing, tell func(history.Event)) *storeTarget {
	return &storeTarget{Store: s, fencing: f, tell: tell, offered: map[string]string{}}
}

func (t *storeTarget) name() string { return t.Server }

// begin makes an empty ledger: workers find one, as those of a service do.
func (t *storeTarget) begin(ctx context.Context, keys []string) (err error) {
	t.key = keys[0]
	if t.client, err = stores.Open(ctx, t.Addr, stores.Options{Fresh: true}); err != nil {
		return err
	}
	if err := t.client.WriteUnfenced(ctx, t.key, []byte{}); err != nil {
		return err
	}
	t.last, err = t.client.Read(ctx, t.key)
	return err
}

func (t *storeTarget) hostPort() string {
	addr, _ := hostPort(t.Addr) // it has been opened
	return addr
}

func (t *storeTarget) url(link linked) (string, error) {
	if link == nil {
		return t.Addr, nil
	}
	return through(t.Addr, link.Addr())
}

func (t *storeTarget) kill(ctx context.Context) error {
	if t.Kill == nil {
		return fmt.Errorf("%s can't be killed: %w", t.Server, errors.ErrUnsupported)
	}
	if err := t.sync(ctx, nil); err != nil { // the last look before
		return err
	}
	t.down, t.refused = true, 0
	return t.Kill(ctx)
}

// restart takes the record as it is then: what a crash has undone is no decision. Whoever decides next knows it.
func (t *storeTarget) restart(ctx context.Context) (err error) {
	if t.Restart == nil {
		return fmt.Errorf("%s can't be restarted: %w", t.Server, errors.ErrUnsupported)
	}
	if err := t.Restart(ctx); err != nil {
		return err
	}
	t.down = false
	t.last, err = t.read(ctx)
	return err
}

func (t *storeTarget) read(ctx context.Context) (resource.Record, error) {
	rec, err := t.client.Read(ctx, t.key)
	if errors.Is(err, resource.ErrNotFound) {
		err = nil // it is gone, which the judge will find out
	}
	return rec, err
}

// call is one that a worker has made of the store, as far as it can be known without an answer.
type call struct {
	op    string
	fence resource.Fence // zero: it had none
	value string         // what was to be written
}

// callOf is the call of which a report tells, nil if it tells of none.
func (t *storeTarget) callOf(e *history.Event) *call {
	if e == nil {
		return nil
	}
	c := &call{}
	switch e.Name {
	case history.BeforeWrite:
		t.offered[e.Actor] = e.Value
		return nil
	case history.Read, history.ReadStale:
		c.op = string(resource.OpRead)
		if t.fencing == history.FencingOn {
			c.fence = resource.Fence{Token: e.Token}
		}
	case history.Wrote, history.WriteStale:
		c.op, c.value = string(resource.OpWrite), t.offered[e.Actor]
		if t.fencing != history.FencingOff {
			c.fence = resource.Fence{Token: e.Token, Seq: 1}
		}
	default:
		return nil
	}
	if e.Name == history.ReadStale || e.Name == history.WriteStale {
		t.refused++
	}
	return c
}

// sync looks at the store, and tells what it has decided since the last look.
func (t *storeTarget) sync(ctx context.Context, told *history.Event) error {
	if t.down {
		return nil
	}
	now, err := t.read(ctx)
	if err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	c := t.callOf(told)
	if d, changed := effect(t.last, now); changed {
		t.decided(t.last, d)
		t.last = now
		if c != nil && d.Op == c.op && d.Token == c.fence.Token && d.Seq == c.fence.Seq {
			return nil
		}
	}
	if c != nil {
		t.decided(now, withoutEffect(now, c))
	}
	return nil
}

// decided tells a decision of the store, whose record was that before.
func (t *storeTarget) decided(before resource.Record, d history.Event) {
	d.Kind, d.Time, d.Key = history.KindDecision, time.Now(), t.key
	d.Seen, d.SeenSeq = before.MaxFence.Token, before.MaxFence.Seq
	t.tell(d)
}

// effect is the call that has made one record of another. It reports whether there was one.
func effect(before, after resource.Record) (d history.Event, changed bool) {
	rose := after.MaxFence.Compare(before.MaxFence) > 0
	same := bytes.Equal(after.Value, before.Value) && (after.Value == nil) == (before.Value == nil)
	if !rose && same {
		return d, false
	}
	d = history.Event{Op: string(resource.OpWrite), Accepted: true, Value: string(after.Value)}
	if rose { // else nobody has looked at a fence
		d.Token, d.Seq, d.Enforced = after.MaxFence.Token, after.MaxFence.Seq, true
	}
	if same && d.Seq == 0 {
		d.Op = string(resource.OpRead)
	}
	return d, true
}

// withoutEffect is what a store that holds rec has decided about a call that has changed nothing. A read needn't; a write that
// was accepted has.
func withoutEffect(rec resource.Record, c *call) history.Event {
	d := history.Event{Op: c.op, Token: c.fence.Token, Seq: c.fence.Seq, Enforced: c.fence != resource.Fence{}, Value: c.value}
	if c.op == string(resource.OpRead) {
		d.Accepted = !d.Enforced || rec.MaxFence.Token == c.fence.Token
		if d.Accepted {
			d.Value = string(rec.Value)
		}
	}
	return d
}

// final reads the ledger. The refusals are those that workers were told of: what the judge counts are those that the record
// shows.
func (t *storeTarget) final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error) {
	rec, err := t.read(ctx)
	return map[string]resource.Record{t.key: rec}, t.refused, err
}

func (t *storeTarget) end(context.Context) error { return nil }

func (t *storeTarget) close() error {
	if t.client == nil {
		return nil
	}
	return t.client.Close()
}
