package redislock

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// reapBatch is how many counters one script checks: about a millisecond of the server's time.
const reapBatch = 500

var floorScript = redis.NewScript("redis.call('GET', ARGV[1]) return 1")

// Reap deletes the fence counters of free keys, and returns how many. It may run at any time, and again after an error. No token
// goes backwards: the script raises fence-floor to the greatest counter that it deletes, and missing counters start there, so
// tokens of a key that is locked again may jump. It can't spare recently used counters: Redis keeps one idle time for all values
// that are the same number below 10,000.
//
// All clients of these locks must know the floor: versions of this package from before Reap don't. Reap returns an error that
// wraps dlock.ErrInvalid where the acquire script can't read the floor, which it doesn't declare: in a Cluster, and in a
// Dragonfly without allow-undeclared-keys. Don't move a reaped Redis's data to one of those: tokens of reaped keys would start at
// 1 again.
func (b *Backend) Reap(ctx context.Context) (int64, error) {
	if _, cluster := b.c.(*redis.ClusterClient); cluster {
		return 0, invalid("counters can't be reaped in a Cluster: a script can't reach those of several slots")
	}
	var (
		reaped  int64
		cursor  uint64
		checked bool // that the floor can be read
		before  = b.o.Prefix + "fence:{"
		match   = globEscaper.Replace(before) + "*}"
	)
	for {
		if _, err := b.check("", time.Second); err != nil {
			return reaped, err
		}
		counters, next, err := b.c.Scan(ctx, cursor, match, reapBatch).Result()
		if err != nil {
			return reaped, failed(ctx, err)
		}
		keys := []string{b.floor}
		for _, counter := range counters {
			names := b.names(strings.TrimSuffix(strings.TrimPrefix(counter, before), "}"))
			keys = append(keys, counter, names[0], names[2])
		}
		if len(keys) > 1 {
			if !checked { // an acquire that can't read the floor starts from 1, as in a Cluster
				err := floorScript.Run(ctx, b.c, keys[1:4], b.floor).Err()
				if answered(err) {
					return 0, invalid("counters can't be reaped: a script can't read %s, from which missing ones start: %v", b.floor, err)
				}
				if err != nil {
					return 0, failed(ctx, err)
				}
				checked = true
			}
			n, err := reapScript.Run(ctx, b.c, keys).Int64()
			if redis.HasErrorPrefix(err, "CROSSSLOT ") { // a client type of the user's own
				return reaped, invalid("counters can't be reaped in a Cluster: %v", err)
			}
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

var globEscaper = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)
