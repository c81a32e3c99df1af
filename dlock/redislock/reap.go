package redislock

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// reapBatch is how many counters one script looks at: about a millisecond of the server's time.
const reapBatch = 500

// Reap deletes the fence counters of keys that are not locked and that nobody has locked for idle, at least, to the
// second; 0 deletes all such. It returns how many it has deleted, and may be run at any time, and again after an error.
//
// Counters never expire, for a counter that started again would hand out old tokens, so the memory of 10 million keys
// that were locked once is never given back otherwise. Reap can't move a token backwards: in the step in which it
// deletes counters it raises the key fence-floor to the greatest of them, and a counter that is not there starts from
// the floor. Tokens of a key may then jump, which tokens may.
//
// Every client of these locks must know the floor: a release of this package from before Reap doesn't. Reap returns an
// error that wraps dlock.ErrInvalid in a Cluster and on a redis.Ring, where one script can't reach all counters and the
// floor, and, if idle is not 0, the server's error under an LFU maxmemory-policy, which keeps no idle times.
func (b *Backend) Reap(ctx context.Context, idle time.Duration) (int64, error) {
	switch b.c.(type) {
	case *redis.ClusterClient, *redis.Ring:
		return 0, fmt.Errorf("%w: redislock: counters can't be reaped in a Cluster or on a redis.Ring: a script can't reach those of several slots or servers",
			dlock.ErrInvalid)
	}
	if idle < 0 {
		return 0, fmt.Errorf("%w: redislock: reap counters that have been idle for %v; want 0 or more", dlock.ErrInvalid, idle)
	}
	var (
		reaped int64
		cursor uint64
		before = b.o.Prefix + "fence:{"
		match  = globEscaper.Replace(before) + "*}"
		least  = int64((idle + time.Second - 1) / time.Second)
	)
	for {
		if b.isClosed() {
			return reaped, dlock.ErrClosed
		}
		counters, next, err := b.c.Scan(ctx, cursor, match, reapBatch).Result()
		if err != nil {
			return reaped, failed(ctx, err)
		}
		keys := []string{b.floor}
		for _, counter := range counters {
			names, err := b.names(strings.TrimSuffix(strings.TrimPrefix(counter, before), "}"))
			if err != nil {
				continue // not one of ours
			}
			keys = append(keys, counter, names[0], names[2])
		}
		if len(keys) > 1 {
			n, err := reapScript.Run(ctx, b.c, keys, least).Int64()
			if err != nil {
				return reaped, failed(ctx, err)
			}
			reaped += n
		}
		if cursor = next; cursor == 0 {
			return reaped, nil
		}
	}
}

// globEscaper makes a name a pattern of SCAN that matches it alone.
var globEscaper = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)
