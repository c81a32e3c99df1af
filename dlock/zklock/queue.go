package zklock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
)

// place is where an owner's nodes for a key are: children of parent named owner + ":" + the sequence number.
type place struct {
	parent, owner string
}

func (b *Backend) place(key, owner string) place {
	return place{b.root + "/" + escape(key), escape(owner)}
}

// escape makes any text a node's name: letters, digits and -_~%+ only, for ZooKeeper refuses some characters, and "." and
// ".." as names.
func escape(s string) string { return strings.ReplaceAll(url.QueryEscape(s), ".", "%2E") }

func (p place) prefix() string { return p.parent + "/" + p.owner + ":" }

// node is a place in the queue of a key.
type node struct {
	parent, name string
	owner        string
	seq          int32
	czxid        int64 // 0 if unknown
}

func (n node) path() string { return n.parent + "/" + n.name }

// list returns the queue of a key, first come first. What isn't a place in it is left out.
func (b *Backend) list(ctx context.Context, parent string) ([]node, error) {
	q, _, err := b.queue(ctx, parent)
	return q, err
}

// queue is list, and tells the number of the last transaction that has made or deleted a node of the queue's parent, 0 if
// that isn't known.
func (b *Backend) queue(ctx context.Context, parent string) (q []node, changed int64, err error) {
	names, stat, err := b.children(ctx, parent)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	q = make([]node, 0, len(names))
	overflow := false
	for _, name := range names {
		i := strings.LastIndexByte(name, ':')
		if i < 0 {
			continue
		}
		seq, err := strconv.ParseInt(name[i+1:], 10, 32)
		if err != nil {
			continue
		}
		q = append(q, node{parent: parent, name: name, owner: name[:i], seq: int32(seq)})
		overflow = overflow || seq < 0 || seq == math.MaxInt32
	}
	if overflow { // a parent that has outlived its counter may be told of no more creations
		q, err = b.byCzxid(ctx, q)
		return q, 0, err
	}
	slices.SortFunc(q, func(m, n node) int { return cmp.Compare(m.seq, n.seq) })
	return q, stat.Pzxid, nil
}

// byCzxid sorts nodes by the transactions that created them, which is what their sequence numbers stand for. It takes a
// question for each node, so it is for a parent that has outlived its 32-bit counter: it wraps around, and the server may
// then give one number several times. An idle parent vanishes, and its successor counts from 0.
func (b *Backend) byCzxid(ctx context.Context, q []node) ([]node, error) {
	live := q[:0]
	for _, n := range q {
		ok, stat, err := b.exists(ctx, n.path())
		if err != nil {
			return nil, err
		}
		if ok {
			n.czxid = stat.Czxid
			live = append(live, n)
		}
	}
	slices.SortFunc(live, func(m, n node) int { return cmp.Compare(m.czxid, n.czxid) })
	return live, nil
}

// of returns the nodes of owner, in order.
func of(q []node, owner string) []node {
	return slices.DeleteFunc(slices.Clone(q), func(n node) bool { return n.owner != owner })
}

// held reports whether another owner than p's has the lock, and p's has no node.
func (b *Backend) held(ctx context.Context, p place) (bool, error) {
	others := func(q []node) bool { return len(q) > 0 && len(of(q, p.owner)) == 0 }
	q, err := b.list(ctx, p.parent)
	if err == nil && others(q) { // or had it a moment ago
		q, err = b.look(ctx, p.parent)
	}
	return others(q), err
}

// look is list, but shows what others have been told before look was called. Otherwise the client's server may lag behind
// theirs. A sync isn't enough: where the client's server is the leader, it does nothing. But writes are in order, and one
// that must fail is as good as any.
func (b *Backend) look(ctx context.Context, parent string) ([]node, error) {
	switch err := b.setData(ctx, parent, nil, math.MaxInt32); {
	case errors.Is(err, zk.ErrNoNode):
		return nil, nil
	case !errors.Is(err, zk.ErrBadVersion):
		return nil, err
	}
	return b.list(ctx, parent)
}

// sweep deletes all nodes of a place, and reports how many there were.
func (b *Backend) sweep(ctx context.Context, p place) (n int, err error) {
	q, err := b.look(ctx, p.parent)
	if err != nil {
		return 0, err
	}
	for _, m := range of(q, p.owner) {
		switch err := b.deleteAt(ctx, m.path(), -1); {
		case err == nil:
			n++
		case !errors.Is(err, zk.ErrNoNode):
			return n, err
		}
	}
	return n, nil
}

// join makes p's node, or finds the one that an earlier request of the same owner has made, whose answer may have been
// lost. It returns its lease, the queue, and whether the node is new. If it fails, nothing is left after until.
//
// Any number is a token that is no less than that of the transaction which created the node, and less than that of the one
// which created the next: tokens are in the order of the queue then. Of a node that is the last in the queue, the last change
// of the queue is one, and is known with the queue.
func (b *Backend) join(ctx context.Context, p place, ttl time.Duration, until time.Time) (l *lease, q []node, fresh bool, err error) {
	session := b.c.SessionID()
	made, sent, err := b.create(ctx, p, ttl)
	defer func() {
		if err == nil || !sent {
			return
		}
		if cut, ok := errors.AsType[*cutShortError](err); ok && cut.sent != nil { // nobody waits for it
			b.doubt(p, time.Now(), cut.sent)
		} else {
			b.doubt(p, until, nil)
		}
	}()
	if err != nil {
		return nil, nil, false, err
	}
	if session != 0 && b.c.SessionID() == session { // none comes back once there was another, so the create was this one's
		l = b.own(p, made, session)
		b.enlist(l) // so that one who repeats the request finds it, whatever becomes of it
	} else if l, err = b.adopt(ctx, p, made); err != nil {
		return nil, nil, false, err
	}
	// The queue that this client sees after its create has every node that was made before.
	var changed int64
	if err = thrice(func() (err error) { q, changed, err = b.queue(ctx, p.parent); return err }); err != nil {
		b.remove(l)
		return nil, nil, false, err
	}
	mine := of(q, p.owner)
	if len(mine) == 0 {
		l.vanish()
		return nil, nil, false, errGone
	}
	if len(mine) == 1 {
		if err := b.number(ctx, l, q, changed); err != nil {
			return nil, nil, false, err
		}
		return l, q, true, nil
	}
	for _, n := range mine[1:] { // the first one is the acquisition; a create whose reply was lost has made it
		if err := b.deleteAt(ctx, n.path(), -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
			b.remove(l)
			return nil, nil, false, err
		}
	}
	if l.path != mine[0].path() {
		l.vanish()
	}
	l, err = b.adopt(ctx, p, mine[0].path())
	return l, q, false, err
}

// number gives l its token, if it has none, by its queue, which has last changed with a transaction of that number.
func (b *Backend) number(ctx context.Context, l *lease, q []node, changed int64) error {
	if l.token != 0 {
		return nil
	}
	if last := q[len(q)-1]; changed != 0 && last.path() == l.path {
		l.token = changed
		return nil
	}
	var ok bool
	var stat *zk.Stat
	err := thrice(func() (err error) { ok, stat, err = b.exists(ctx, l.path); return err })
	switch {
	case err != nil:
		b.remove(l)
		return err
	case !ok:
		l.vanish()
		return errGone
	}
	l.token = stat.Czxid
	return nil
}

// create makes a node at the end of p's queue, and its parent if need be. A create whose reply is lost is repeated; that
// the first may have been applied comes out in the queue. sent is that there may be a node.
func (b *Backend) create(ctx context.Context, p place, ttl time.Duration) (made string, sent bool, err error) {
	for range 3 {
		err = thrice(func() (err error) {
			made, err = b.createAt(ctx, p.prefix(), lifetime(ttl), zk.FlagEphemeral|zk.FlagSequence)
			cut, isCut := errors.AsType[*cutShortError](err)
			sent = sent || err == nil || isCut && cut.sent != nil || broken(err) && !errors.Is(err, zk.ErrNoServer)
			return err
		})
		if !errors.Is(err, zk.ErrNoNode) {
			return made, sent, err
		}
		if err := b.createParent(ctx, p.parent); err != nil {
			return "", sent, err
		}
	}
	return "", sent, err
}

// createParent makes a key's parent a container: a node that the server deletes some time after its last child is gone. A
// server that has none (before 3.5) gets a plain node, which stays.
func (b *Backend) createParent(ctx context.Context, parent string) error {
	if !b.plain.Load() {
		err := b.createNode(ctx, parent, b.createContainer)
		if err == nil || err.Error() != errUnimplemented.Error() {
			return err
		}
		b.plain.Store(true) // such a server closes the connection too
	}
	return b.createNode(ctx, parent, b.createPlain)
}

// errUnimplemented is what the client makes of the code for an operation that the server doesn't know; it has no name for it.
var errUnimplemented = fmt.Errorf("unknown error: %v", zk.ErrCode(-6))

func (b *Backend) createPlain(ctx context.Context, path string) error {
	_, err := b.createAt(ctx, path, nil, zk.FlagPersistent)
	return err
}

// createNode has create make a node that stays, and plain ones above it if need be. That it is there already is as good.
func (b *Backend) createNode(ctx context.Context, path string, create func(ctx context.Context, path string) error) error {
	err := thrice(func() error { return create(ctx, path) })
	if errors.Is(err, zk.ErrNoNode) {
		if err := b.createNode(ctx, dir(path), b.createPlain); err != nil {
			return err
		}
		err = thrice(func() error { return create(ctx, path) })
	}
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

func dir(path string) string { return path[:strings.LastIndexByte(path, '/')] }

// lifetime is a node's data.
func lifetime(ttl time.Duration) []byte { return []byte(ttl.String()) }

// thrice repeats f while its connection breaks, as the client's own recipes do.
func thrice(f func() error) (err error) {
	for range 3 {
		if err = f(); !broken(err) || errors.Is(err, zk.ErrNoServer) { // no server: not sent, and none to send to
			return err
		}
	}
	return err
}

// broken reports whether err is the connection's, and no answer of the server's.
func broken(err error) bool {
	if _, ok := errors.AsType[*cutShortError](err); ok {
		return false
	}
	for _, e := range []error{zk.ErrConnectionClosed, zk.ErrNoServer, zk.ErrClosing, zk.ErrSessionExpired, zk.ErrSessionMoved} {
		if errors.Is(err, e) {
			return true
		}
	}
	_, ok := errors.AsType[net.Error](err) // a write failed
	return ok
}
