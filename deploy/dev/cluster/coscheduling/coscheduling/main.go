// The coscheduling plugin of scheduler-plugins and the controller of its PodGroups: two of that project's
// programs in one, without its other plugins. "coscheduling controller" is the controller, anything else the
// scheduler with the flags of kube-scheduler.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	controllers "sigs.k8s.io/scheduler-plugins/cmd/controller/app"
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"

	// Knows the plugin's arguments.
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "controller" {
		os.Exit(runController(os.Args[2:]))
	}
	os.Exit(cli.Run(app.NewSchedulerCommand(app.WithPlugin(coscheduling.Name, coscheduling.New))))
}

func runController(arguments []string) int {
	pflag.CommandLine.AddGoFlagSet(flag.CommandLine) // --kubeconfig
	options := controllers.NewServerRunOptions()
	if err := pflag.CommandLine.Parse(arguments); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if err := controllers.Run(options); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
