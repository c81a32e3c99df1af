package etcdlock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// quietTime is how long a waiter trusts that it will be told. In a queue that moves it is served before that, and has
	// then sent one request; a holder that has died is no more in anyone's way before its session ends, which takes longer.
	quietTime = time.Second
	// longQuietTime is how long one that watches the key before its own trusts in that, before it asks for the two keys. If the
	// store was restored to an earlier revision, a watch tells nothing before that at which it began has come again.
	longQuietTime = 10 * time.Second
	// messageTime is how long a waiter that has seen the key before it go waits for the message before it looks.
	messageTime = 20 * time.Millisecond
	// ahead is how many of its followers a holder knows at most. One hand-over in so many takes two commits.
	ahead = 32
)

// place is a key in a queue.
type place struct {
	name string // without the queue's: {LEASE}-{N}
	rev  int64  // its create revision
}

// lease returns the session of a place.
func (p place) lease() (clientv3.LeaseID, error) {
	id, _, _ := strings.Cut(p.name, "-")
	n, err := strconv.ParseInt(id, 16, 64)
	return clientv3.LeaseID(n), err
}

func (p place) in(queue string) clientv3.Cmp { return owns(queue+p.name, uint64(p.rev)) }

// turn is a key's being first in its queue.
type turn struct {
	rev  int64     // the key's create revision; 0: it isn't
	as   time.Time // when it was, at the latest
	line []place   // who follows, in order, as far as is known; any of them may have left
}

// inbox is the name of the key by which a session is told of its turns.
func (b *Backend) inbox(id clientv3.LeaseID) string { return fmt.Sprintf("%sturn/%x", b.prefix, id) }

// format is what a session is told: the key that is first in a queue, its followers, and the queue.
func format(queue string, line []place) string {
	var m strings.Builder
	for _, p := range line {
		fmt.Fprintf(&m, "%s %d ", p.name, p.rev)
	}
	return m.String() + "\n" + queue
}

// parse is the reverse of format. What is not of this form comes to nothing.
func parse(m string) (queue string, line []place) {
	places, queue, _ := strings.Cut(m, "\n")
	f := strings.Fields(places)
	for i := 0; i+1 < len(f); i += 2 {
		rev, err := strconv.ParseInt(f[i+1], 10, 64)
		if err != nil {
			return "", nil
		}
		line = append(line, place{f[i], rev})
	}
	return queue, line
}

// lineOf reads a queue's first keys.
func lineOf(queue string, kvs []*mvccpb.KeyValue) (line []place) {
	for _, kv := range kvs {
		line = append(line, place{strings.TrimPrefix(string(kv.Key), queue), kv.CreateRevision})
	}
	return line
}

// claimOf returns the claim of this Backend that has a place, or nil.
func (b *Backend) claimOf(queue string, p place) *claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.names[queue+p.name]
}

// pass is the part of a transaction that deletes a key which, if there is a line, has the lock. It tells the first of the
// line that it is first now, if it is there still; a claim of this Backend needs no message. Otherwise, or if there is no
// line, it asks for the queue's first keys, as before the deletion.
func (b *Backend) pass(queue string, line []place) (op clientv3.Op, told bool) {
	who := clientv3.OpGet(queue, clientv3.WithPrefix(), clientv3.WithKeysOnly(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend), clientv3.WithLimit(1+ahead))
	if len(line) == 0 {
		return who, false
	}
	op, err := b.message(queue, line)
	if err != nil {
		return who, false
	}
	var tell []clientv3.Op
	if b.claimOf(queue, line[0]) == nil {
		tell = []clientv3.Op{op}
	}
	return clientv3.OpTxn([]clientv3.Cmp{line[0].in(queue)}, tell, []clientv3.Op{who}), true
}

// passed sees to the answer to pass, in a transaction that left at sent and deleted a key of the queue.
func (b *Backend) passed(
	ctx context.Context, queue, name string, line []place, answer *pb.ResponseOp, told bool, sent time.Time,
) {
	if told {
		txn := answer.GetResponseTxn()
		if txn.Succeeded {
			b.claimOf(queue, line[0]).tell(line, sent)
			return
		}
		answer = txn.Responses[0]
	}
	line = lineOf(queue, answer.GetResponseRange().GetKvs())
	if len(line) < 2 || queue+line[0].name != name {
		return // nobody follows, or the key was not first
	}
	line = line[1:]
	if c := b.claimOf(queue, line[0]); c != nil {
		c.tell(line, sent)
		return
	}
	op, err := b.message(queue, line)
	if err != nil || !b.begin() {
		return
	}
	go func() { // if this fails, the waiter finds out for itself
		defer b.busy.Done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
		defer cancel()
		_, _ = b.router.commit(ctx, []clientv3.Cmp{line[0].in(queue)}, []clientv3.Op{op}, nil)
	}()
}

// message tells the first of line that it is first in its queue, and who follows it.
func (b *Backend) message(queue string, line []place) (clientv3.Op, error) {
	id, err := line[0].lease()
	return clientv3.OpPut(b.inbox(id), format(queue, line), clientv3.WithLease(id)), err
}

// tell tells a claim that its key, the first of line, is the first of its queue, as of a request that left at sent. c may
// be nil.
func (c *claim) tell(line []place, as time.Time) {
	if c == nil {
		return
	}
	c.mu.Lock()
	c.last = turn{line[0].rev, as, line[1:]}
	c.mu.Unlock()
	select {
	case c.told <- struct{}{}:
	default:
	}
}

// turnOf returns the turn of the key created at rev, if it was told of one.
func (c *claim) turnOf(rev int64) turn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last.rev != rev {
		return turn{}
	}
	return c.last
}

// followers returns whom a grant's holder knows to follow it. c may be nil.
func (c *claim) followers(fence uint64) []place {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if fence == 0 || uint64(c.rev) != fence {
		return nil
	}
	return c.line
}

// listen has the session's waiters told of their turns, from the first call's revision on, until the session ends. It
// reports whether all is heard from rev on; not so if a put that was answered later has its waiter listen first.
func (s *session) listen(b *Backend, rev int64) (all bool) {
	s.listens.Do(func() {
		s.from = rev
		if !b.begin() {
			return
		}
		go func() {
			defer b.busy.Done()
			s.hear(b, rev)
		}()
	})
	return s.from <= rev
}

// hear watches the session's inbox from revision rev on. What it misses, because etcd has compacted it or was restored to
// an earlier revision, waiters find out for themselves.
func (s *session) hear(b *Backend, rev int64) {
	ctx, cancel := context.WithCancel(b.open)
	defer cancel()
	go func() {
		select {
		case <-s.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	for rest := minPause; ctx.Err() == nil; rest = min(2*rest, maxPause) {
		w := b.router.take()
		there, leave := context.WithCancel(ctx)
		stop := context.AfterFunc(w.over, leave)
		var err error
		watched, refused := b.watching(there)
		// One watch for as long as the session lasts: to open one for each acquisition takes etcd longer than a hand-over.
		for resp := range w.watcher.Watch(watched, b.inbox(s.id), clientv3.WithRev(rev), clientv3.WithFilterDelete()) {
			now := time.Now()
			for _, e := range resp.Events {
				if queue, line := parse(string(e.Kv.Value)); len(line) > 0 {
					b.claimOf(queue, line[0]).tell(line, now)
				}
				rev, rest = e.Kv.ModRevision+1, minPause
			}
			rev, err = max(rev, resp.CompactRevision), resp.Err()
		}
		stop()
		leave()
		refused(err)
		if w.over.Err() == nil && ctx.Err() == nil {
			if err == nil || passing(err) { // a leader that is none any more would refuse it again
				b.router.leave(w)
			}
			pause(ctx, rest)
		}
		b.router.give(w)
	}
}
