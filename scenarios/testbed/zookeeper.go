package testbed

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Names of the environment variables that choose a ZooKeeper.
const (
	EnvZooKeeperImage  = "FENCELAB_ZOOKEEPER_IMAGE"
	EnvZooKeeperServer = "FENCELAB_ZOOKEEPER_SERVER" // the path of zkServer.sh
	EnvZooKeeperAddr   = "FENCELAB_ZOOKEEPER_ADDR"   // host:port of each member, separated by commas
)

// ZooKeeperImage is the image that containers run unless FENCELAB_ZOOKEEPER_IMAGE names another.
const ZooKeeperImage = "zookeeper:3.8.4"

// ZooKeeperTick is ZooKeeper's tickTime here: sessions expire at multiples of it and last for 2 ticks at least.
const ZooKeeperTick = 200 * time.Millisecond

var zooKeeperKind = kind{
	name: "zookeeper", title: "ZooKeeper", env: "ZOOKEEPER",
	image: ZooKeeperImage, ports: []int{2181, 2888, 3888}, data: "/data",
	timeout:  time.Minute, // a second is usual, but a JVM on a busy machine is slow
	want:     "host:port (several: separated by commas)",
	url:      func(addr string) string { return addr },
	programs: []string{zkServer()}, dirs: []string{"/usr/share/zookeeper/bin"},
	apt: "zookeeper default-jre-headless", brew: "zookeeper",
	ready: zooKeeperReady,
	leads: func(ctx context.Context, addr string) (bool, error) {
		answer, err := zooKeeperAsk(ctx, addr, "srvr")
		return strings.Contains(answer, "\nMode: leader\n") || strings.Contains(answer, "\nMode: standalone\n"), err
	},
}

// zkServer is the name of the script that runs a server.
func zkServer() string {
	if runtime.GOOS == "darwin" {
		return "zkServer" // Homebrew's
	}
	return "zkServer.sh"
}

// StartZooKeeper starts an ensemble of n members, zk1 to zkN, or finds the external one, and returns once all of them
// serve clients; n is 1 or 3. A member killed and restarted keeps its data. It answers every four-letter command.
// The rest is as [StartRedis] says.
func StartZooKeeper(ctx context.Context, n int, o *Options) (*Cluster, error) {
	if n != 1 && n != 3 {
		return nil, fmt.Errorf("testbed: an ensemble of %d ZooKeepers, want 1 or 3", n)
	}
	g := &group{kind: &zooKeeperKind, linked: n > 1, command: zooKeeperCommand}
	for i := range n {
		g.names = append(g.names, "zk"+strconv.Itoa(i+1))
	}
	return start(ctx, g, o)
}

// zooKeeperCommand runs zkServer.sh, which knows where its installation has what. More arguments are lines of zoo.cfg.
func zooKeeperCommand(_ context.Context, at place) (command, error) {
	c := command{Env: []string{
		"JMXDISABLE=true",
		"SERVER_JVMFLAGS=" + strings.Join([]string{
			"-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", // starts fast, and has little to do
			"-XX:-UsePerfData", // no file in /tmp
			"-Djava.net.preferIPv4Stack=true",
			// To its output only. zkServer.sh has its own value before this, and the last one counts.
			"-Dzookeeper.root.logger=INFO,CONSOLE",
			// Debian's ZooKeeper finds nothing to log with. Elsewhere there are no such files, which does no harm.
			"-Xbootclasspath/a:/usr/share/java/slf4j-api.jar:/usr/share/java/slf4j-simple.jar",
		}, " "),
	}}
	config, id := zooKeeperConfig(at), strconv.Itoa(at.Self+1)
	if at.Provider == Containers {
		c.Args = []string{
			"sh", "-c", `cd "$0" && echo "$1" >myid && echo "$2" >zoo.cfg && exec zkServer.sh start-foreground "$0/zoo.cfg"`,
			at.Dir, id, config,
		}
		return c, nil
	}
	file := filepath.Join(at.Dir, "zoo.cfg")
	for name, text := range map[string]string{file: config, filepath.Join(at.Dir, "myid"): id} {
		if err := os.WriteFile(name, []byte(text+"\n"), 0o600); err != nil {
			return c, fmt.Errorf("testbed: %w", err)
		}
	}
	c.Args = []string{filepath.Base(at.Path), "start-foreground", file}
	return c, nil
}

// zooKeeperConfig is zoo.cfg. Names that ZooKeeper doesn't know become system properties, zookeeper.*.
func zooKeeperConfig(at place) string {
	lines := []string{
		"dataDir=" + at.Dir,
		"clientPort=" + strconv.Itoa(at.me().Ports[0]),
		"clientPortAddress=" + at.Listen,
		"maxClientCnxns=0", // unlimited: all clients come from one address
		"tickTime=" + strconv.FormatInt(ZooKeeperTick.Milliseconds(), 10),
		"maxSessionTimeout=" + strconv.FormatInt(time.Hour.Milliseconds(), 10),
		"initLimit=50",                            // ticks for a follower to catch up
		"syncLimit=5",                             // ticks without an answer after which a leader or follower is given up
		"preAllocSize=1024",                       // KiB of a log file, instead of 64 MiB
		"forceSync=no",                            // data need to survive a kill, not a power cut
		"admin.enableServer=false",                // it would listen on a port of its own
		"4lw.commands.whitelist=*",                // conf, cons, mntr, ruok, wchp, ...
		"cnxTimeout=500",                          // ms to connect to a peer in an election; 5 s by default
		"electionPortBindRetry=1",                 // a taken port is tried again elsewhere
		"fastleader.maxNotificationInterval=1000", // ms between repeated votes; a minute by default
	}
	if len(at.Peers) > 1 {
		for i, p := range at.Peers {
			lines = append(lines, fmt.Sprintf("server.%d=%s:%d:%d", i+1, p.Host, p.Ports[1], p.Ports[2]))
		}
	}
	return strings.Join(append(lines, at.More...), "\n")
}

var zooKeeperVersion = regexp.MustCompile(`(?m)^Zookeeper version: (\d+\.\d+\.\d+)`)

// zooKeeperReady asks a server about itself. One that doesn't serve clients yet has only that to say, though it answers
// ruok already.
func zooKeeperReady(ctx context.Context, addr string, _ int) (string, error) {
	answer, err := zooKeeperAsk(ctx, addr, "srvr")
	if err != nil {
		return "", err
	}
	version := zooKeeperVersion.FindStringSubmatch(answer)
	if version == nil {
		return "", fmt.Errorf("it doesn't serve yet: %q", answer)
	}
	return version[1], nil
}

// zooKeeperAsk sends a four-letter command.
func zooKeeperAsk(ctx context.Context, addr, word string) (answer string, err error) {
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
