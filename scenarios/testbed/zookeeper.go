package testbed

import (
	"context"
	"fmt"
	"io"
	"net"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

var zooKeeper = serverType{
	name: "zookeeper", title: "ZooKeeper", image: "zookeeper:3.8.4", ports: []int{2181, 2888, 3888}, data: "/data",
	program: zkServer(), dirs: []string{"/usr/share/zookeeper/bin"}, apt: "zookeeper default-jre-headless", brew: "zookeeper",
	url:     "%s",
	linked:  true,
	command: zooKeeperCommand,
	ready: func(ctx context.Context, addr, _ string, _ bool) (string, error) {
		answer, err := fourLetters(ctx, addr, "srvr") // ruok is answered too early
		if err != nil {
			return "", err
		}
		version := zooKeeperVersion.FindStringSubmatch(answer)
		if version == nil {
			return "", fmt.Errorf("it isn't serving yet: %q", answer)
		}
		return version[1], nil
	},
	leads: func(ctx context.Context, addr string) (bool, error) {
		answer, err := fourLetters(ctx, addr, "srvr")
		return strings.Contains(answer, "\nMode: leader\n") || strings.Contains(answer, "\nMode: standalone\n"), err
	},
}

var zooKeeperVersion = regexp.MustCompile(`(?m)^Zookeeper version: (\d+\.\d+\.\d+)`)

func zkServer() string {
	if runtime.GOOS == "darwin" {
		return "zkServer" // Homebrew's
	}
	return "zkServer.sh"
}

// zooKeeperTick is tickTime: sessions expire at its multiples and last at least 2 ticks.
const zooKeeperTick = 200 * time.Millisecond

// StartZooKeeper starts an ensemble of n members, 1 or 3, named zk1 to zkN, and returns once all serve clients. All four-letter
// commands are allowed. Options.Args are lines of zoo.cfg.
func StartZooKeeper(ctx context.Context, n int, o *Options) (*Cluster, error) {
	if n != 1 && n != 3 {
		return nil, fmt.Errorf("testbed: a ZooKeeper ensemble of %d members; want 1 or 3", n)
	}
	return start(ctx, &group{serverType: &zooKeeper, names: numbered("zk", n)}, o)
}

func zooKeeperCommand(_ context.Context, at placement) (command, error) {
	config := path.Join(at.Dir, "zoo.cfg")
	c := command{
		Args: []string{filepath.Base(at.Path), "start-foreground", config},
		Env: []string{"JMXDISABLE=true", "SERVER_JVMFLAGS=" + strings.Join([]string{
			"-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", // starts fast, and has little to do
			"-XX:-UsePerfData", // no file in /tmp
			"-Djava.net.preferIPv4Stack=true",
			// Only to the console; the last value counts.
			"-Dzookeeper.root.logger=INFO,CONSOLE",
			// Debian's ZooKeeper lacks a logger; elsewhere these files don't exist, which is harmless.
			"-Xbootclasspath/a:/usr/share/java/slf4j-api.jar:/usr/share/java/slf4j-simple.jar",
		}, " ")},
		Files: map[string][]byte{
			config:                    []byte(zooKeeperConfig(at)),
			path.Join(at.Dir, "myid"): []byte(strconv.Itoa(at.Self+1) + "\n"),
		},
	}
	if at.Provider == Containers { // by a shell: the image's entrypoint would change user and configuration
		c.Args = []string{"sh", "-c", `cd "$0" && exec zkServer.sh start-foreground "$0/zoo.cfg"`, at.Dir}
	}
	return c, nil
}

// zooKeeperConfig returns zoo.cfg. Unknown keys become system properties zookeeper.*.
func zooKeeperConfig(at placement) string {
	lines := []string{
		"dataDir=" + at.Dir,
		"clientPort=" + strconv.Itoa(at.me().Ports[0]),
		"clientPortAddress=" + at.Listen,
		"maxClientCnxns=0", // unlimited: all clients come from one address
		"tickTime=" + strconv.FormatInt(zooKeeperTick.Milliseconds(), 10),
		"maxSessionTimeout=" + strconv.FormatInt(time.Hour.Milliseconds(), 10),
		"initLimit=50",             // ticks for a follower to catch up
		"syncLimit=5",              // ticks without an answer before a leader or follower is dropped
		"preAllocSize=1024",        // KiB of a log file, instead of 64 MiB
		"forceSync=no",             // data survive a kill, not a power failure
		"admin.enableServer=false", // it has a port of its own
		"4lw.commands.whitelist=*",
		"cnxTimeout=500",                          // ms to connect to a peer in an election; 5 s by default
		"electionPortBindRetry=1",                 // a taken port is retried elsewhere, by this package
		"fastleader.maxNotificationInterval=1000", // ms between repeated votes; a minute by default
	}
	if len(at.Peers) > 1 {
		for i, p := range at.Peers {
			lines = append(lines, fmt.Sprintf("server.%d=%s:%d:%d", i+1, p.Host, p.Ports[1], p.Ports[2]))
		}
	}
	return strings.Join(append(lines, at.More...), "\n") + "\n"
}

func fourLetters(ctx context.Context, addr, word string) (answer string, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := io.WriteString(conn, word); err != nil {
		return "", err
	}
	b, err := io.ReadAll(conn)
	return string(b), err
}
